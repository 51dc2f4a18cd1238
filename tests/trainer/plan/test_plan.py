"""`trainer plan`: a plan that runs, its parts, and what is refused."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from ckptkit import Coords
from tests.support.printed import printed
from tests.trainer.support.option_walk import VALID, choices_of_options, run_of
from tests.trainer.support.training import call, write_config, write_stores
from threefold.options import FlagText
from trainer.cli import main
from trainer.config.resolve import layout_of, resolve
from trainer.config.walk import load_config
from trainer.engine import DTYPES
from trainer.model.table import local_runs, parameter_table
from trainer.plan.axis_volumes import axis_volumes
from trainer.plan.rates import Rates
from trainer.plan.search import CLOSE, best_plans
from trainer.plan.step_time import group_places
from trainer.plan.store_moves import store_moves
from trainer.plan.trace import traced
from trainer.plan.volumes import VolumeTable, tokens_of
from trainer.plan.written import write_config as write_plan

Capture = pytest.CaptureFixture[str]
H100 = Rates.of_card("h100", network=50e9, node=8)


def test_a_plan_is_written_that_trains(tmp_path: Path, capsys: Capture) -> None:
    write_stores(tmp_path)
    config, output = str(write_config(tmp_path)), str(tmp_path / "planned.toml")
    words = ["plan", config, "--gpus", "1", "--json", "-", "--output", output]
    code, out, err = printed(main, words, capsys)
    assert code == 0, err
    assert "not measured" in err
    best, *others = json.loads(out)
    assert best["fits"]
    assert sum(best["time"].values()) == pytest.approx(best["seconds"])
    assert sum(best["memory"].values()) == best["bytes"]
    assert all(best["seconds"] <= CLOSE * other["seconds"] for other in others)
    assert load_config(output).train.micro_batch_size == best["settings"]["train.micro_batch_size"]
    assert call("train", output, "--train-steps", 2) == 0


@pytest.mark.slow
@pytest.mark.ci
def test_every_plan_is_a_configuration_that_starts(tmp_path: Path) -> None:
    config, output = "examples/llama-3-8b.toml", str(tmp_path / "planned.toml")
    run = run_of(config, model__vocab_size="128256", train__global_batch_size="1024")
    kinds = set()
    for gpus, objective in ((16, "time"), (16, "memory"), (512, "memory")):
        for plan in best_plans(run, gpus, H100, objective):
            write_plan(output, config, "", {}, run, plan)
            started = load_config(output, {**VALID, "model.vocab_size": FlagText("128256", "")}, world_size=gpus)
            assert started.parallel == replace(plan.config.parallel, dp=started.parallel.dp)
            kinds |= {f"zero {started.parallel.zero_stage}", started.train.recompute}
            kinds |= {"groups"} if started.parallel.dp_shard else set()
    assert kinds >= {"zero 2", "zero 3", "none", "selective", "full", "groups"}


@pytest.mark.usefixtures("leases_with_content")
@pytest.mark.parametrize(
    ("zero", "shard", "how"),
    [
        *((zero, shard, "wide") for zero, shard in ((0, 0), (1, 0), (2, 0), (3, 0), (2, 2), (3, 2))),
        *((1, 0, how) for how in ("bf16", "int8")),
        (3, 2, "int8"),
    ],
)
def test_weights_travel_as_in_the_run(zero: Literal[0, 1, 2, 3], shard: int, how: Any) -> None:
    run = run_of("examples/gpt-small.toml", model__num_layers="5", model__vocab_size="512")
    parallel = replace(run.parallel, dp=4, zero_stage=zero, dp_shard=shard, grad_reduce=how)
    train = replace(run.train, micro_batch_size=1, global_batch_size=12)
    config = resolve(replace(run, parallel=parallel, train=train), 4)
    runs = local_runs(config, parameter_table(config), layout_of(config), Coords())
    planned, real = Counter[str](), Counter[str]()
    for move in store_moves(config, runs, group_places(config)):
        planned[f"{move.kind} {move.group.rpartition('.')[2]}"] += round(move.num_bytes * move.times)
    for known, count in traced(config, 0).moves.items():
        if known.reason != "loss, norm and counts":
            group = "shard" if zero > 1 and not shard and known.num_bytes > 1 << 17 else known.group
            real[f"{known.kind} {group}"] += known.num_bytes * count
    assert planned == real


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--gpu", "h1000", "--gpus", "1"], "no GPU named h1000 is known here; known are b200"),
        (["--gpus", "7"], "no layout of 7 GPUs"),
        (["--output", "{}/nowhere/plan.toml"], "the folder"),
    ],
)
def test_what_cannot_be_planned_is_one_line(words: list[str], text: str, tmp_path: Path, capsys: Capture) -> None:
    code, out, err = printed(main, ["plan", "examples/tiny.toml", *(word.format(tmp_path) for word in words)], capsys)
    assert (code, out) == (2, "")
    assert text in err


@pytest.mark.slow
@pytest.mark.ci
def test_volumes_of_layers_are_those_of_the_run() -> None:
    flags = {"parallel__tp": "2", "parallel__dp": "2", "train__micro_batch_size": "2"}
    run = run_of("examples/gpt-small.toml", model__num_layers="5", model__vocab_size="512", **flags)
    number, volumes = run.train.gradient_accumulation_steps, VolumeTable().of(run)
    expected = Counter({move: 5 * number * count for move, count in volumes.layer.items()})
    expected.update({move: number * count for move, count in volumes.ends.items()})
    assert tokens_of(traced(run, 0).moves) == expected


@pytest.mark.slow
@pytest.mark.ci
def test_more_memory_is_never_slower() -> None:
    run = run_of("examples/llama-3-8b.toml", model__vocab_size="128256")
    few, many = (best_plans(run, 8, replace(H100, capacity=size), "time")[0] for size in (40e9, 141e9))
    assert few.fits
    assert few.memory.total <= 40e9
    assert many.time.total <= CLOSE * few.time.total


@pytest.mark.slow
@pytest.mark.ci
def test_every_choice_of_an_option_is_planned() -> None:
    tried = []
    for name, run in choices_of_options("examples/gpt-small.toml", model__num_layers="2", model__vocab_size="512"):
        assert best_plans(run, 1, H100, "time")[0].time.total > 0, name
        tried.append(name)
    assert len(set(tried)) > 30


@pytest.mark.parametrize(
    "flags",
    [
        {"parallel__tp": "2", "parallel__dp": "2", "parallel__zero_stage": "2"},
        {"parallel__cp": "2", "parallel__dp": "4", "parallel__zero_stage": "1", "model__tie_embeddings": "true"},
    ],
)
def test_an_axis_moves_what_the_run_does(flags: dict[str, str]) -> None:
    flags = flags | {"model__num_layers": "3", "model__vocab_size": "512", "train__global_batch_size": "32"}
    run = run_of("examples/gpt-small.toml", train__micro_batch_size="2", **flags)
    world_size = run.parallel.tp * run.parallel.cp * run.parallel.dp
    config = resolve(run, world_size)
    planned = {axis.axis: axis.num_bytes for axis in axis_volumes(config, H100, VolumeTable().of(config))}
    real = Counter[str]()
    for call_made, number in traced(config, 0).moves.items():
        if call_made.reason != "loss, norm and counts":
            real[call_made.group.rpartition(".")[2]] += call_made.num_bytes * number
    assert sum(planned.values()) == sum(real.values())
    assert planned["tp" if run.parallel.tp > 1 else "cp"] == real["tp" if run.parallel.tp > 1 else "cp"]


def test_what_a_pipeline_rank_sends_is_counted() -> None:
    flags = {"parallel__pp": "2", "parallel__virtual_stages": "2", "model__num_layers": "4", "model__vocab_size": "512"}
    config = resolve(run_of("examples/gpt-small.toml", **flags), 2)
    (volume,) = axis_volumes(config, H100, VolumeTable().of(config))
    sends = 3 * config.train.gradient_accumulation_steps  # of its two stages the last one sends nothing forward
    tokens = config.train.micro_batch_size * config.train.seq_length
    itemsize = DTYPES[config.train.precision].itemsize
    assert (volume.axis, volume.num_bytes) == ("pp", sends * tokens * config.model.hidden_size * itemsize)
    assert volume.bytes_per_s == pytest.approx(H100.link)


def test_the_curve_of_more_gpus(tmp_path: Path, capsys: Capture) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "curve.png"
    words = ["plan", "examples/gpt-small.toml", "--model.num-layers", "2", "--model.vocab-size", "512", "--gpus", "1"]
    sizes = ["--global-batch-size", "8", "--scale", "7"]
    code, out, err = printed(main, [*words, *sizes, "--json", "-", "--plot", str(picture)], capsys)
    assert code == 0, err
    assert picture.read_bytes().startswith(b"\x89PNG")
    points = json.loads(out)
    assert [(point["gpus"], point["batch"]) for point in points] == [(1, 8), (2, 8), (4, 8), (7, 8)]
    assert points[0]["share"] == 1.0
    assert points[2]["tokens_per_s"] > points[0]["tokens_per_s"]
    assert "no layout of 7 GPUs" in points[3]["reason"]
    code, out, err = printed(main, [*words, *sizes, "--scale-batch", "grown"], capsys)
    assert (code, [line.split()[1] for line in out.splitlines()]) == (0, ["batch", "8", "16", "32", "56"])


def test_a_curve_without_gpus_is_one_line(capsys: Capture) -> None:
    code, out, err = printed(main, ["plan", "examples/gpt-small.toml", "--plot", "curve.png"], capsys)
    assert (code, out) == (2, "")
    assert "scale" in err


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("path", ["examples/llama-3-8b.toml", "examples/qwen3-30b-a3b.toml"])
def test_no_plan_is_faster_than_its_bound(path: str) -> None:
    run = run_of(path, model__vocab_size="128256", train__global_batch_size="256")
    for plan in best_plans(run, 16, replace(H100, capacity=400e9), "memory"):
        assert plan.time.total >= plan.candidate.bound, plan.candidate
