"""Sinks as a run opens them: none costs a package, what cannot be is refused at once, and each option does its part."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.support.training import ROOT, Job, call, hash_of, lines
from trainer.run.logs import rank_file

PACKAGES = ("tensorboard", "wandb", "mlflow")


@pytest.mark.slow
@pytest.mark.ci
def test_a_run_imports_no_package_of_a_sink(job_config: Path, tmp_path: Path) -> None:
    for package in PACKAGES:
        (tmp_path / f"{package}.py").write_text("raise SystemExit(77)")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "trainer", "train", job_config, "--train-steps", "1", "--metrics", tmp_path / "m"]
    assert subprocess.run(command, env=environment, cwd=ROOT, capture_output=True).returncode == 0
    assert len(lines(tmp_path / "m")) == 1


@pytest.mark.parametrize(
    ("flags", "code", "text", "hint"),
    [
        (["--log.to", "jsonl,tensorbord"], 2, "log.to: must be one of jsonl, tensorboard, wandb, mlflow, got", ""),
        (
            ["--log.project", "mine"],
            2,
            "log.project needs log.to with wandb or mlflow: --log.to jsonl,wandb",
            "",
        ),
        (["--log.to", "wandb", "--metrics", "m"], 2, "log.metrics needs log.to with jsonl: --log.to jsonl", ""),
        (["--log.ranks", "all"], 2, "log.ranks needs log.metrics: --metrics FILE", ""),
        (
            ["--log.on-event", "./no-such"],
            2,
            "log.on_event: './no-such' is not a command that is found here",
            "command",
        ),
        (["--log.on-event", "'"], 2, 'log.on_event "\'": No closing quotation', "--log.on-event"),
    ],
)
def test_what_cannot_be_is_one_line(
    flags: list[str], code: int, text: str, hint: str, job_config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("train", job_config, "--train-steps", 1, *flags) == code
    said = capsys.readouterr().err
    assert text in said
    assert f"hint: {hint}" in said


def test_a_package_that_is_missing_is_said_with_what_installs_it(
    job_config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("threefold.packages.find_spec", lambda name: None)
    assert call("train", job_config, "--train-steps", 1, "--log.to", "wandb") == 2
    said = capsys.readouterr().err
    assert "log.to wandb needs the package wandb, which is not installed" in said
    assert 'hint: pip install "wandb' in said


def test_a_folder_that_is_not_to_be_written_is_refused(
    job_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trainer.run.logs.require", lambda *_: None)
    (tmp_path / "file").write_text("")
    flags = ["--log.to", "tensorboard", "--log.tensorboard-dir", tmp_path / "file" / "tb"]
    assert call("train", job_config, "--train-steps", 1, *flags) == 3
    said = capsys.readouterr().err
    assert f"log.tensorboard_dir {tmp_path}/file/tb cannot be written: Not a directory" in said
    assert "hint: --log.tensorboard-dir tensorboard" in said


def test_events_reach_a_command_and_its_faults_are_said_once(
    job_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "notify"
    script.write_text(f"#!/bin/sh\ncat >> {tmp_path}/heard\necho >> {tmp_path}/heard\necho no luck >&2\nexit 3\n")
    script.chmod(0o755)
    assert call("train", job_config, "--train-steps", 2, "--log.on-event", script) == 0
    assert [json.loads(line) for line in (tmp_path / "heard").read_text().split("\n") if line] == [
        {"event": "end", "step": 2, "complete": True}
    ]
    said = capsys.readouterr().err
    assert f"warning: on-event: {script}, for the event end of step 2, ended with 3: no luck" in said


def test_an_end_by_a_fault_is_an_event_too(
    job_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--train-steps", 3, "--metrics", tmp_path / "m", "--lr", 1e30, "--optim.min-lr", 1e30]
    assert call("train", job_config, *flags) == 2
    [end] = lines(tmp_path / "m", "end")
    assert end["complete"] is False
    assert "the loss is" in end["error"]


def test_norms_and_files_of_ranks_change_no_bit(job_config: Path, tmp_path: Path) -> None:
    for name, flags in (("off", []), ("on", ["--log.norms-interval", 1, "--log.ranks", "all"])):
        where = ["--save", tmp_path / name, "--metrics", tmp_path / f"{name}.jsonl"]
        assert call("train", job_config, "--train-steps", 3, *where, *flags) == 0
    assert hash_of(tmp_path / "off", 3) == hash_of(tmp_path / "on", 3)
    for line in lines(tmp_path / "on.jsonl"):
        squares = [norm**2 for norm in line["grad_norms"].values()]
        assert sum(squares) ** 0.5 == pytest.approx(line["grad_norm"], rel=1e-12)
        assert line["weight_norms"].keys() == {"embed", "layers.0", "layers.1", "layers.2", "norm", "head"}
    [own, *_] = lines(Path(rank_file(str(tmp_path / "on.jsonl"), 0)))
    assert own["rank"] == 0
    assert own["forward_s"] > 0 < own["backward_s"]
    assert "loss" not in own
    assert lines(tmp_path / "off.jsonl")[0]["grad_norms"] is None


@pytest.mark.ci
@pytest.mark.slow
def test_each_rank_has_a_file_of_its_own_times(job_config: Path, tmp_path: Path) -> None:
    metrics = tmp_path / "m.jsonl"
    Job(2, job_config, "--dp", 2, "--train-steps", 3, "--log.ranks", "all", metrics=metrics).run()
    whole, own = lines(metrics), [lines(Path(rank_file(str(metrics), rank))) for rank in range(2)]
    for line, *each in zip(whole, *own, strict=True):
        assert [part["rank"] for part in each] == [0, 1]
        for name in ("comm_s", "forward_s", "data_wait_s", "memory_gib"):
            assert line[name] == max(part[name] for part in each), name
