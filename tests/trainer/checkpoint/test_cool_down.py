"""Cool-downs: begun from any saved step by one flag, without a jump of the rate, and kept by every later start."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.support.training import call, curve
from trainer.checkpoint.progress import YOUNG, recorded_tables
from trainer.config import Config, Fp8Config

FLAT = ("--optim.schedule", "constant", "--lr", 4e-3, "--optim.min-lr", 1e-3)


def train(config: Path, folder: Path, run: str, *flags: object) -> int:
    return call("train", config, "--save", folder / run, "--metrics", folder / f"{run}.jsonl", *flags)


def recorded(run: Path) -> dict[str, Any]:
    newest = max(run.glob("step-*"))
    return dict(json.loads((newest / "root.json").read_text())["metadata"]["config"])


def test_a_cool_down_from_a_saved_step_in_a_run_of_its_own(
    job_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(job_config, tmp_path, "flat", *FLAT, "--train-steps", 4, "--save-interval", 2) == 0
    branch = (*FLAT, "--load", tmp_path / "flat" / "step-000000002", "--cool-down", 4, "--train-steps", 100)
    capsys.readouterr()
    assert train(job_config, tmp_path, "cooled", *branch, "--save-interval", 2) == 0
    said = capsys.readouterr().err
    assert "optim.cool_down_steps 0 -> 4, optim.cool_down_from 0 -> 2, optim.cool_down_lr 0 -> 0.004" in said
    assert "cools down since step 2: from 0.004 to 0.001 by its end, step 6" in said
    assert "done after step 6" in said
    assert curve(tmp_path / "flat.jsonl", "lr") == dict.fromkeys(range(1, 5), 4e-3)
    rates = curve(tmp_path / "cooled.jsonl", "lr")
    assert rates == pytest.approx({3: 4e-3, 4: 3.25e-3, 5: 2.5e-3, 6: 1.75e-3}, rel=1e-12)
    losses = [curve(tmp_path / f"{run}.jsonl", "loss") for run in ("flat", "cooled")]
    assert losses[0][3] == losses[1][3]  # the branch is the run, until its rate is another


@pytest.mark.slow
@pytest.mark.ci
def test_later_starts_go_on_with_the_cool_down_named_or_not(
    job_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    linear = ("--optim.schedule", "linear", "--optim.decay-steps", 10)
    assert train(job_config, tmp_path, "whole", *linear, "--train-steps", 3) == 0
    assert train(job_config, tmp_path, "whole", *linear, "--cool-down", 4, "--optim.wsd-decay", "sqrt") == 0
    assert train(job_config, tmp_path, "parts", *linear, "--train-steps", 3) == 0
    capsys.readouterr()
    parts = (*linear, "--optim.wsd-decay", "sqrt", "--save-interval", 1)
    for flags in (["--cool-down", 4], [], ["--cool-down", 4]):
        call("train", job_config, "--save", tmp_path / "parts", "--metrics", tmp_path / "parts.jsonl", *parts,
             "--train.max-time-s", 1e-9, *flags)  # one step a start  # fmt: skip
    assert train(job_config, tmp_path, "parts", *parts) == 0
    whole, found = (curve(tmp_path / f"{run}.jsonl", "lr") for run in ("whole", "parts"))
    assert found == whole
    assert [*whole] == [*range(1, 8)]
    assert curve(tmp_path / "parts.jsonl", "loss") == curve(tmp_path / "whole.jsonl", "loss")
    optim = recorded(tmp_path / "parts")["optim"]
    assert [optim[f"cool_down_{name}"] for name in ("steps", "from")] == [4, 3]
    said = capsys.readouterr().err
    assert said.count("not bit for bit") == 1  # where it began
    assert "the run ends at" not in said


def test_a_run_goes_back_to_its_schedule(job_config: Path, tmp_path: Path) -> None:
    assert train(job_config, tmp_path, "run", *FLAT, "--train-steps", 2) == 0
    assert train(job_config, tmp_path, "run", *FLAT, "--cool-down", 2) == 0
    assert train(job_config, tmp_path, "run", *FLAT, "--cool-down", -1, "--train-steps", 5) == 0
    assert curve(tmp_path / "run.jsonl", "lr") == pytest.approx(
        {1: 4e-3, 2: 4e-3, 3: 4e-3, 4: 2.5e-3, 5: 4e-3}, rel=1e-12
    )
    assert not recorded(tmp_path / "run")["optim"].get("cool_down_steps")


def test_what_has_no_step_does_not_cool_down(
    job_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(job_config, tmp_path, "run", "--cool-down", 4) == 2
    assert "a cool-down begins from a saved step: nothing is there to resume" in capsys.readouterr().err
    assert train(job_config, tmp_path, "run", "--optim.cool-down-from", 4) == 2
    assert "are of a cool-down: --cool-down 100" in capsys.readouterr().err


def test_a_step_records_younger_keys_only_where_they_say_something(job_config: Path, tmp_path: Path) -> None:
    assert train(job_config, tmp_path, "run", "--train-steps", 1) == 0
    assert not set(YOUNG["optim"]) & recorded(tmp_path / "run")["optim"].keys()
    assert train(job_config, tmp_path, "flat", *FLAT, "--train-steps", 1) == 0
    assert set(YOUNG["optim"]) & recorded(tmp_path / "flat")["optim"].keys() == {"schedule"}
    tables = recorded_tables(Config())
    assert tables.keys() == {"model", "parallel", "data", "optim", "train", "ops", "checkpoint", "log"}
    assert recorded_tables(Config(fp8=Fp8Config(recipe="rowwise")))["fp8"] == {"recipe": "rowwise"}
