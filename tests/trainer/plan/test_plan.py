"""`trainer plan`: a plan that runs, its parts, and what is refused."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.printed import printed
from tests.trainer.support.option_walk import choices_of_options, run_of
from tests.trainer.support.training import call, write_config, write_stores
from trainer.cli import main
from trainer.config.walk import load_config
from trainer.plan.rates import Rates
from trainer.plan.search import best_plans
from trainer.plan.trace import traced
from trainer.plan.volumes import VolumeTable, tokens_of

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
    assert all(best["seconds"] <= other["seconds"] for other in others)
    assert load_config(output).train.micro_batch_size == best["settings"]["train.micro_batch_size"]
    assert call("train", output, "--train-steps", 2) == 0


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
    assert many.time.total <= few.time.total


@pytest.mark.slow
@pytest.mark.ci
def test_every_choice_of_an_option_is_planned() -> None:
    tried = []
    for name, run in choices_of_options("examples/gpt-small.toml", model__num_layers="2", model__vocab_size="512"):
        assert best_plans(run, 1, H100, "time")[0].time.total > 0, name
        tried.append(name)
    assert len(set(tried)) > 30
