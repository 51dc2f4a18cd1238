"""Sums of gradients beside the backward, updates and gathers beside what follows: no bit changes."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit import Run, hash_checkpoint
from ckptkit.model.layout import ParallelLayout
from tests.trainer.support.parity import config_for, local_batch, make_engine, small
from tests.trainer.support.threads import run_threads
from tests.trainer.support.training import call, write_config, write_stores
from tests.trainer.test_equalities import assert_equal
from trainer.config import Config
from trainer.mesh.group import Network
from trainer.ops.adamw import IntervalTable


def config(model: str, layout: str, **parallel: Any) -> Config:
    made = small(config_for(model, ParallelLayout.parse(layout)))
    return replace(made, parallel=replace(made.parallel, **parallel))


@pytest.mark.parametrize(
    ("model", "layout", "zero_stage"),
    [
        ("gpt2", "dp2", 1),
        ("llama", "tp2-dp2", 0),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("llama", "dp4", 1), ("gpt2", "dp2-pp2", 1), ("llama", "tp2-dp2", 1), ("gpt2", "dp2-pp2", 0))
        ),
    ],
)
def test_overlap_changes_no_bit(model: str, layout: str, zero_stage: int) -> None:
    on = config(model, layout, zero_stage=zero_stage)
    assert_equal(on, replace(on, parallel=replace(on.parallel, overlap_grad_reduce=False, overlap_param_gather=False)))


def calls_of_the_first_step(rank: int, config: Config, *, network: Network) -> list[tuple[str, str]]:
    """The kind and the group of each."""
    engine = make_engine(rank, config, network=network)
    engine.mesh.recorder.calls.clear()
    engine.train_step(0, local_batch(config, 0, engine.mesh))
    return [(each.kind, each.group) for each in engine.mesh.recorder.calls]


@pytest.mark.parametrize("overlaps", [True, False])
def test_sums_begin_before_the_backward_ends(overlaps: bool) -> None:
    made = config("llama", "tp2-dp2", overlap_grad_reduce=overlaps, sequence_parallel="off")

    for kinds in run_threads(4, calls_of_the_first_step, made):
        last_of_the_backward = max(place for place, kind in enumerate(kinds) if kind == ("all_reduce", "tp"))
        assert (kinds.index(("reduce_scatter", "dp")) < last_of_the_backward) == overlaps


def test_the_sum_over_two_stages_waits_for_the_last_send() -> None:
    made = config("gpt2", "pp2")

    kinds = run_threads(2, calls_of_the_first_step, made)[1]
    last_send = max(place for place, kind in enumerate(kinds) if kind == ("send", "gradients"))
    assert kinds.index(("reduce_scatter", "cp.dp.ends")) > last_send


def losses_of_rows(rank: int, config: Config, lengths: Sequence[int], *, network: Network) -> list[tuple[float, float]]:
    """Loss and gradient norm of a step for each length of rows."""
    engine, found = make_engine(rank, config, network=network), []
    for step, length in enumerate(lengths):
        longer = replace(config, train=replace(config.train, seq_length=length))
        stats = engine.train_step(step, local_batch(longer, step, engine.mesh))
        found.append((stats.loss, stats.grad_norm))
    return found


@pytest.mark.parametrize(
    ("model", "layout"), [("llama", "dp2"), ("gpt2", "dp2"), ("llama", "tp2-dp2"), ("gpt2", "pp2")]
)
def test_rows_of_another_length_in_mid_run_change_no_bit(model: str, layout: str) -> None:
    """With logits made in parts, of which longer rows have more."""
    made = config(model, layout)
    made = replace(made, train=replace(made.train, max_logits_gib=8 * 61 * 8 / 2**30))  # 8 tokens of 61 logits at once
    made = replace(made, model=replace(made.model, num_positions=64 if made.model.position == "learned" else 0))
    apart = replace(made, parallel=replace(made.parallel, overlap_grad_reduce=False))
    lengths = (16, 16, 48, 8, 48)

    found, expected = (
        run_threads(made_of.parallel.tp * made_of.parallel.pp * made_of.parallel.dp, losses_of_rows, made_of, lengths)
        for made_of in (made, apart)
    )
    assert found == expected


def test_a_gradient_that_comes_after_its_sum_began_is_an_error() -> None:
    made = config("gpt2", "tp1")
    engine = make_engine(0, made)
    batch = local_batch(made, 0, engine.mesh)
    engine.train_step(0, batch)
    engine.store.begin_step(len(batch.tokens))
    weight = engine.store.weight("pos.weight")
    bucket = next(each for each in engine.store.buckets if any("pos.weight" in run.names for run in each.plan.runs))
    while not bucket.is_reducing:
        weight.add_gradient(lambda out, first: None)
    with pytest.raises(AssertionError, match="a gradient came after the sum over ranks had begun"):
        weight.add_gradient(lambda out, first: None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_save_beside_an_update_holds_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_stores(tmp_path)
    write_config(tmp_path)
    flags = [tmp_path / "job.toml", "--train.device", "cuda", "--bf16", "--deterministic", "--train-steps", 4]
    flags += ["--save-interval", 1, "--optim.decay-steps", 4]
    assert call("train", *flags, "--save", tmp_path / "one", "--overlap-param-gather", "false") == 0
    real = IntervalTable.adamw

    def slowly(self: IntervalTable, *arguments: Any, **options: Any) -> None:
        torch.cuda._sleep(20_000_000)  # cycles: about 10 ms each
        real(self, *arguments, **options)

    monkeypatch.setattr(IntervalTable, "adamw", slowly)
    assert call("train", *flags, "--save", tmp_path / "other") == 0
    for step in range(1, 5):
        hashes = []
        for run in ("one", "other"):
            with Run(str(tmp_path / run)).open(step) as reader:
                hashes.append(hash_checkpoint(reader))
        assert hashes[0] == hashes[1], step
