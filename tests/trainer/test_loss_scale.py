"""fp16 and its loss scale: how it moves, that it leaves no trace in what it scales, and who is void by an overflow."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ckptkit.cli import main as ckptkit
from ckptkit.model.layout import ParallelLayout
from tests.trainer.support.parity import local_batch, make_engine, run_steps
from tests.trainer.support.scale_faults import (
    compare_overflowed,
    compare_resumed,
    compare_scaled,
    compare_scaler,
    half_config,
    overflow,
)
from tests.trainer.support.training import call, curve, lines
from tests.trainer.support.void_faults import states
from trainer.config import Config, TrainConfig
from trainer.config.resolve import layout_of
from trainer.engine import Engine
from trainer.loss_scale import LARGEST, MOST_VOIDS, NAMES, LossScale, recorded, recorded_in
from trainer.store.lr import learning_rate
from trainer.verdict import Outcome, StepStats, Verdict
from trainer.verify.threads import run_threads

LAYOUTS = [ParallelLayout(tp=2), ParallelLayout(pp=2), ParallelLayout(dp=2)]


def moved(scale: LossScale, steps: str, state: Tensor | None = None) -> Tensor:
    """The state after steps that count, ".", and that overflow, "x"."""
    state = torch.tensor(scale.start(), dtype=torch.float64) if state is None else state
    for step in steps:
        state = scale.after(state, torch.tensor(step == "x"))
    return state


def test_nothing_is_scaled_in_another_precision() -> None:
    assert LossScale.of(TrainConfig(precision="bf16")) is None
    assert LossScale.of(TrainConfig(precision="fp16")) == LossScale(65536.0, 1.0, LARGEST, 1000, 2)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ("x", [64, 0, 1, 0]),
        ("xx", [32, 0, 0, 0]),
        ("xxx", [16, 0, 0, 0]),
        ("x..x", [32, 0, 0, 0]),  # what hysteresis allows comes back where the scale grows
        ("x...x", [128, 0, 1, 0]),
        ("..", [64, 2, 2, 0]),
        ("...", [128, 0, 2, 0]),
        ("..x..", [64, 2, 1, 0]),
        ("xxxxxxx", [4, 0, 0, 2]),
        ("xxxxxxx.", [4, 1, 0, 0]),
    ],
)
def test_it_moves_as_megatrons_does(steps: str, expected: list[float]) -> None:
    assert moved(LossScale(64.0, 4.0, LARGEST, window=3, hysteresis=2), steps).tolist() == expected


@given(steps=st.text("..x", max_size=200), window=st.integers(1, 8))
def test_it_moves_as_torchs_does(steps: str, window: int) -> None:
    scale, count = torch.tensor([2.0**16]), torch.zeros(1, dtype=torch.int32)
    state = moved(LossScale(2.0**16, 0.0, LARGEST, window, 1), "")
    for step in steps:
        torch._amp_update_scale_(scale, count, torch.tensor([float(step == "x")]), 2.0, 0.5, window)
        state = moved(LossScale(2.0**16, 0.0, LARGEST, window, 1), step, state)
        assert state[:2].tolist() == [float(scale), int(count)]


def test_one_that_is_given_does_not_move() -> None:
    scale = LossScale.of(TrainConfig(precision="fp16", loss_scale=1000.0))
    assert scale is not None
    for steps in ("x" * 20, "." * 2000):
        assert moved(scale, steps)[0] == 1000
    assert scale.start([64.0, 5.0, 1.0, 2.0]) == [1000.0, 5.0, 1.0, 2.0], "a run that goes on with another"


def test_a_scale_is_bounded_where_a_run_goes_on() -> None:
    moving = LossScale(64.0, 16.0, LARGEST, 3, 2)
    assert moving.start([4.0, 1.0, 1.0, 0.0])[0] == 16.0
    assert moved(moving, "...", torch.tensor([LARGEST, 0, 2, 0], dtype=torch.float64))[0] == LARGEST


def test_voids_in_a_row_at_the_smallest_scale_end_a_run() -> None:
    smallest = LossScale(4.0, 2.0, LARGEST, 1000, 1)
    verdict = Verdict(torch.device("cpu"), 1.0, smallest)
    infinite, one = torch.tensor([torch.inf], dtype=torch.float64), torch.ones((), dtype=torch.float64)
    found = []
    for step in range(2 * MOST_VOIDS + 2):
        verdict.judge(step + 1, one, one.view(1) if step == MOST_VOIDS - 1 else infinite, one)
        found.append(Outcome(int(verdict.numbers[4])))
    voids = [Outcome.SKIPPED] * (MOST_VOIDS - 1)
    assert found == [*voids, Outcome.COUNTS, *voids, *[Outcome.STUCK] * 3]
    assert verdict.numbers[0] == 2 * MOST_VOIDS, "the step that is named"


def test_a_loss_that_is_not_finite_is_bad_though_gradients_are() -> None:
    verdict = Verdict(torch.device("cpu"), 1.0, LossScale(4.0, 2.0, LARGEST, 1000, 1))
    one = torch.ones((), dtype=torch.float64)
    verdict.judge(1, one * torch.nan, one.view(1), one)
    assert verdict.numbers[4] == Outcome.BAD


def test_no_trace_is_left() -> None:
    compare_scaled()
    compare_overflowed()
    compare_scaler()


@pytest.mark.ci
@pytest.mark.slow
def test_a_run_goes_on_bit_for_bit() -> None:
    compare_resumed()


@pytest.mark.parametrize("values", [None, 3, [1], {}, {"scale": "x"}, dict.fromkeys(NAMES, -1), dict.fromkeys(NAMES)])
def test_a_record_that_is_not_whole_is_none(values: Any) -> None:
    assert recorded_in({"loss_scale": values}) == ()
    assert recorded_in(recorded([64.0, 1.0, 2.0, 0.0])) == (64, 1, 2, 0)


@pytest.mark.ci
@pytest.mark.slow
def test_no_bit_depends_on_how_a_step_is_run() -> None:
    one = half_config(ParallelLayout(pp=2, dp=2), initial_loss_scale=2.0**25, hysteresis=1)
    parallel = one.parallel
    expected = bits_of(one)
    assert None not in expected[0]
    for schedule in ("gpipe", "zb-h1"):
        assert bits_of(replace(one, parallel=replace(parallel, schedule=schedule))) == expected  # type: ignore[arg-type]
    alone = replace(parallel, overlap_grad_reduce=False, overlap_param_gather=False)
    assert bits_of(replace(one, parallel=alone)) == expected
    assert bits_of(replace(one, train=replace(one.train, recompute="full"))) == expected  # type: ignore[arg-type]


def bits_of(config: Config) -> tuple[Any, ...]:
    runs = run_threads(layout_of(config).world_size, run_steps, config, 4)
    assert not all(map(math.isfinite, runs[0]["norms"])), "a step is void"
    numbers = [runs[0]["losses"], list(map(str, runs[0]["norms"]))]
    return (*numbers, [piece.data.tobytes() for run in runs for piece in run["weights"]])


def overflow_on_the_last(rank: int, layout: ParallelLayout, *, network: Any) -> list[StepStats]:
    """Three steps, of which the second overflows on the last rank, which is the stage with the loss."""
    config = half_config(layout, initial_loss_scale=2.0**12, loss_scale_window=3, hysteresis=1)
    engine = make_engine(rank, config, network=network)
    if rank == layout.world_size - 1:
        overflow(engine, 1)
    stats, before = [], list[Tensor]()
    for step in range(3):
        stats.append(engine.train_step(step, local_batch(config, step, engine.mesh)))
        engine.store.join()
        if step == 0:
            before = [state.clone() for state in states(engine.store)]
        if step == 1:
            assert all(torch.equal(now, then) for now, then in zip(states(engine.store), before, strict=True))
    assert not all(torch.equal(now, then) for now, then in zip(states(engine.store), before, strict=True))
    return stats


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_an_overflow_on_one_rank_is_void_on_all(layout: ParallelLayout) -> None:
    for stats in run_threads(layout.world_size, overflow_on_the_last, layout):
        assert [each.outcome for each in stats] == [Outcome.COUNTS, Outcome.SKIPPED, Outcome.COUNTS]
        assert [each.scale for each in stats] == [(4096, 1, 1, 0), (2048, 0, 0, 0), (2048, 1, 0, 0)]
        assert [each.voids for each in stats] == [0, 1, 1]


class Oracle:
    """The masters of an engine, trained by torch's AdamW with its GradScaler on the engine's own scaled gradients."""

    def __init__(self, engine: Engine, initial: float, window: int) -> None:
        self.engine, self.optim = engine, engine.config.optim
        self.parameters = [torch.nn.Parameter(bucket.master.clone()) for bucket in engine.store.buckets]
        betas, options = (self.optim.beta1, self.optim.beta2), {"eps": self.optim.eps, "weight_decay": 0.0}
        self.optimizer = torch.optim.AdamW(self.parameters, betas=betas, **options)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=initial, growth_interval=window)
        self.scaler.scale(torch.zeros(()))
        self.skipped: list[bool] = []

    def take(self, step: int) -> None:
        before = self.num_updates
        for parameter, bucket in zip(self.parameters, self.engine.store.buckets, strict=True):
            parameter.grad = bucket.gradients.clone()
        self.optimizer.param_groups[0]["lr"] = learning_rate(self.optim, step)
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.parameters, self.optim.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.skipped.append(self.num_updates == before)

    @property
    def num_updates(self) -> int:
        state = self.optimizer.state[self.parameters[0]]
        return int(state["step"]) if state else 0


@pytest.mark.ci
@pytest.mark.slow
def test_two_hundred_steps_are_those_of_torchs_scaler() -> None:
    initial, window = 2.0**30, 9
    scale = {"initial_loss_scale": initial, "loss_scale_window": window, "min_loss_scale": 2.0**-20, "hysteresis": 1}
    config = half_config(global_batch_size=2, gradient_accumulation_steps=2, **scale)
    engine = make_engine(0, config)
    engine.config = config  # without weight decay, which some parameters have and others do not
    object.__setattr__(config.optim, "weight_decay", 0.0)
    oracle, skipped = Oracle(engine, initial, window), []
    for step in range(200):
        assert engine.verdict.numbers[6] == oracle.scaler.get_scale(), f"step {step}"
        batch = local_batch(config, step, engine.mesh)
        stats = engine.start_step(step, batch, before_update=lambda step=step: oracle.take(step)).read()
        skipped.append(stats.outcome is Outcome.SKIPPED)
    assert skipped == oracle.skipped
    assert 10 < sum(skipped) < 100
    assert 200 - engine.verdict.numbers[5] == oracle.num_updates
    for bucket, expected in zip(engine.store.buckets, oracle.parameters, strict=True):
        torch.testing.assert_close(bucket.master, expected.detach(), rtol=1e-4, atol=2e-5)


@pytest.fixture(scope="module")
def half_run(job_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a few steps, of which the first ones are void."""
    folder = tmp_path_factory.mktemp("half")
    flags = ["--train-steps", 5, "--initial-loss-scale", 2**24, "--hysteresis", 1, "--metrics", folder / "run.jsonl"]
    assert call("train", job_config, "--fp16", "--save", folder / "run", *flags) == 0
    return folder / "run"


def test_the_metrics_have_scale_and_void_steps(half_run: Path) -> None:
    metrics = half_run.with_suffix(".jsonl")
    scales, voids, norms = (curve(metrics, name) for name in ("loss_scale", "void_steps", "grad_norm"))
    assert list(voids.values()) == [1, 2, 2, 2, 2]
    assert list(scales.values()) == [2**23, *[2**22] * 4]
    assert [step for step, norm in norms.items() if norm is None] == [1, 2]
    assert [event["step"] for event in lines(metrics, "void")] == [1, 2]
    json.loads(metrics.read_text().splitlines()[1], parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    root = json.loads((half_run / "step-000000005" / "root.json").read_text())
    assert root["metadata"]["updates"] == 3
    assert list(root["metadata"]["loss_scale"].values()) == [2**22, 3, 0, 0]


def test_what_opens_runs_opens_this_one(half_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = []
    for flags in ([], ["--train.precision", "fp32"]):
        assert call("eval", half_run, "--json", *flags) == 0
        losses.append(json.loads(capsys.readouterr().out)["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0] != losses[1]
    vocabulary = {f"w{number}": number for number in range(61)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"}
    tokenizer = {"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "model": model, "added_tokens": []}
    (tmp_path / "tok.json").write_text(json.dumps(tokenizer))
    prompt = ["--prompt", "w1 w2", "--data.tokenizer", tmp_path / "tok.json", "--tokens", 2]
    assert call("generate", half_run, *prompt) == 0
    assert ckptkit(["export", str(half_run), str(tmp_path / "hf"), "--to", "hf", "--dtype", "fp16"]) == 0


def test_a_run_that_is_stuck_ends_by_name(job_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--fp16", "--loss-scale", 2.0**40, "--save", tmp_path / "run"]
    for last in (10, 10):  # what it saved is the step before, with the count of those that overflowed
        assert call("train", job_config, *flags) == 2
        text = f"step {last}: gradients overflowed in 10 steps in a row at the smallest loss scale, 1.09951e+12"
        assert text in capsys.readouterr().err
        assert [path.name for path in (tmp_path / "run").glob("step-*")] == ["step-000000009"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--fp16", "--loss-scale", 0], "train.loss_scale: must be above 0, got '0'"),
        (["--loss-scale", 2], 'train.loss_scale needs train.precision = "fp16", which is "fp32"'),
        (["--bf16", "--hysteresis", 3], 'train.hysteresis needs train.precision = "fp16", which is "bf16"'),
        (
            ["--fp16", "--loss-scale", 2, "--loss-scale-window", 3],
            "train.loss_scale_window needs a factor that moves, without train.loss_scale",
        ),
        (["--fp16", "--initial-loss-scale", 2, "--min-loss-scale", 4], "initial_loss_scale 2 is below"),
        (["--fp16", "--optim.master", "split"], 'optim.master needs train.precision = "bf16", which is "fp16"'),
    ],
)
def test_what_does_not_fit_is_refused(
    job_config: Path, flags: list[Any], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("train", job_config, *flags, "--dry-run") == 2
    assert expected in capsys.readouterr().err


def test_a_scale_that_rounds_is_warned_of(job_config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for scale, warned in ((1000, True), (1024, False)):
        assert call("train", job_config, "--fp16", "--loss-scale", scale, "--train-steps", 1) == 0
        text = f"warning: {scale:,} is not a power of two"
        assert (text in capsys.readouterr().err) is warned
