"""A start with another optimizer: refused, or printed; what is kept, and what begins at zero."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ckptkit.model.layout import ParallelLayout
from tests.trainer.support.parity import config_for, small
from tests.trainer.support.training import call, curve, hash_of
from trainer.checkpoint.mapping import tensor_table
from trainer.checkpoint.resets import reset_of
from trainer.model.table import parameter_table


def train(config: Path, run: Path, steps: int, *flags: object) -> int:
    places = ["--save", run, "--metrics", f"{run}.jsonl"]
    return call("train", config, *places, "--train-steps", steps, "--optim.decay-steps", 8, *flags)


def updates_of(run: Path, step: int) -> int:
    return int(json.loads((run / f"step-{step:09}" / "root.json").read_text())["metadata"]["updates"])


def test_another_optimizer_is_refused_and_said(
    job_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert train(job_config, run, 2) == 0
    capsys.readouterr()
    assert train(job_config, run, 3, "--optim.name", "sgd") == 2
    printed = capsys.readouterr().err
    assert "has the optimizer state of another optimizer: at zero begins momentum of" in printed
    assert "--optim.allow-reset goes on so, --optim.name adamw as it was trained" in printed
    assert train(job_config, run, 3, "--optim.name", "lion", "--optim.allow-reset") == 0
    printed = capsys.readouterr().err
    assert (
        "another optimizer goes on with the parameters: kept is exp_avg of 30 tensors, not read is exp_avg_sq"
        in printed
    )
    assert "optim.name adamw -> lion" in printed
    assert train(job_config, run, 4, "--optim.name", "lion") == 0  # it is the run's own by now
    assert "another optimizer" not in capsys.readouterr().err
    assert updates_of(run, 4) == 4
    assert train(job_config, run, 6, "--optim.allow-reset", "true") == 0
    printed = capsys.readouterr().err
    assert "at zero begins exp_avg of 30 tensors and exp_avg_sq of 30 tensors" in printed
    assert "AdamW counts its updates from here on" in printed
    assert updates_of(run, 6) == 2


@pytest.mark.parametrize("name", ["muon", "lion", "sgd"])
def test_a_resume_has_the_bits_of_the_run_that_went_on(name: str, job_config: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(job_config, whole, 4, "--optim.name", name) == 0
    for steps in (2, 4):
        assert train(job_config, parts, steps, "--optim.name", name) == 0
    assert hash_of(parts, 4) == hash_of(whole, 4)
    assert curve(Path(f"{parts}.jsonl")) == curve(Path(f"{whole}.jsonl"))


def stored(name: str) -> dict[str, object]:
    config = small(config_for("llama", ParallelLayout()))
    table = parameter_table(replace(config, optim=replace(config.optim, name=name)))
    return {info.name: info for info in tensor_table(table, torch.float64)}


def test_what_is_damage_is_no_other_optimizer() -> None:
    table = parameter_table(small(config_for("llama", ParallelLayout())))
    whole = stored("adamw")
    assert reset_of(table, whole) is None
    assert reset_of(table, {name: info for name, info in whole.items() if not name.startswith("optim.")}) is None
    assert reset_of(table, {name: info for name, info in whole.items() if name != "optim.exp_avg/norm.weight"}) is None
    assert reset_of(table, stored("sgd")) is not None


def test_a_row_of_adamw_that_begins_at_zero_takes_all_with_it() -> None:
    """They have one count of updates."""
    table = parameter_table(small(config_for("llama", ParallelLayout())))
    mixed = stored("adamw")
    del mixed["optim.exp_avg_sq/norm.weight"]
    reset = reset_of(table, mixed)
    assert reset is not None
    assert reset.counts_again
    assert not reset.continued
    assert set(reset.zeroed) == {name for name in stored("adamw") if name.startswith("optim.")}
