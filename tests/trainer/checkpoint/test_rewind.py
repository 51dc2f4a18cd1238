"""A run goes on from an older step of its own: newer steps are set aside once, the metrics file is cut back."""

import shutil
from pathlib import Path

import pytest
import torch

from ckptkit import Run, pin
from ckptkit.loading.roots import read_root
from tests.trainer.support.training import Job, call, lines
from threefold.storage import open_storage


@pytest.fixture(scope="module")
def trained(job_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of four steps, each saved, and its metrics."""
    folder = tmp_path_factory.mktemp("trained")
    torch.set_num_threads(1)  # as in each test
    assert train(job_config, folder, 4) == 0
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    shutil.copytree(trained, tmp_path / "here")
    return tmp_path / "here"


def train(config: Path, folder: Path, num_steps: int, *flags: object) -> int:
    return call(
        "train", config, "--train-steps", num_steps, "--optim.decay-steps", 9, "--save", folder / "run",
        "--save-interval", 1, "--metrics", folder / "m.jsonl", *flags,
    )  # fmt: skip


def step_of(folder: Path, step: int) -> Path:
    return folder / "run" / f"step-{step:09d}"


def attempts(folder: Path) -> dict[int, str]:
    run = Run(folder / "run")
    return {step: run.root(step).attempt for step in run.steps()}


def test_a_run_goes_on_from_an_older_step(job_config: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, curve = attempts(folder), [line["loss"] for line in lines(folder / "m.jsonl")]
    assert train(job_config, folder, 3, "--load", step_of(folder, 2), "--rewind") == 0
    said = capsys.readouterr().err
    assert f"goes back to step 2: 2 newer steps of {folder / 'run'} are set aside, 3 to 4" in said
    assert "resumed from step 2" in said
    now = attempts(folder)
    assert [*now] == [1, 2, 3]
    assert (now[2], now[3] == before[3]) == (before[2], False)
    assert [line["step"] for line in lines(folder / "m.jsonl")] == [1, 2, 3]
    assert [line["loss"] for line in lines(folder / "m.jsonl")] == curve[:3]
    assert Run(folder / "run").undo_rollback(3).brought_back == [4]


def test_the_same_command_resumes_what_it_saved_since(
    job_config: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--load", step_of(folder, 1), "--rewind")
    assert train(job_config, folder, 2, *flags) == 0
    second = attempts(folder)[2]
    capsys.readouterr()
    assert train(job_config, folder, 3, *flags) == 0
    assert "resumed from step 2" in capsys.readouterr().err
    assert attempts(folder)[2] == second
    assert train(job_config, folder, 4) == 0  # a start that asks for nothing
    assert train(job_config, folder, 2, *flags) == 0  # and so one more rewind
    assert [*attempts(folder)] == [1, 2]
    assert attempts(folder)[2] != second


def test_newer_steps_are_not_set_aside_unasked(
    job_config: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = attempts(folder)
    assert train(job_config, folder, 4, "--load", step_of(folder, 2)) == 2
    said = capsys.readouterr().err
    assert "--load names step 2 of the run that is saved to, whose newest step is 4" in said
    assert "--rewind" in said.partition("hint:")[2]
    assert attempts(folder) == before
    assert len(lines(folder / "m.jsonl")) == 4
    assert train(job_config, folder, 4, "--load", step_of(folder, 4)) == 0


@pytest.mark.slow
def test_ranks_go_back_together(job_config: Path, folder: Path) -> None:
    flags = ("--pp", 2, "--train-steps", 3, "--optim.decay-steps", 9, "--save", folder / "run", "--save-interval", 1)
    job = Job(2, job_config, *flags, "--load", step_of(folder, 2), "--rewind", metrics=folder / "m.jsonl")
    assert job.run().count("goes back to step 2: 2 newer steps of") == 1
    assert [*attempts(folder)] == [1, 2, 3]
    assert [line["step"] for line in lines(folder / "m.jsonl")] == [1, 2, 3]


def test_a_pinned_newer_step_is_refused_before_anything_changes(
    job_config: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pin(open_storage(folder / "run"), 4)
    assert train(job_config, folder, 4, "--load", step_of(folder, 2), "--rewind") == 2
    assert f"step 4 of {folder / 'run'} is pinned" in capsys.readouterr().err
    assert [*attempts(folder)] == [1, 2, 3, 4]


def test_a_damaged_step_is_not_gone_back_to(job_config: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    next(step_of(folder, 2).glob("*/part-00000.safetensors")).unlink()
    assert train(job_config, folder, 4, "--load", step_of(folder, 2), "--rewind") == 1
    assert "part-00000.safetensors is missing" in capsys.readouterr().err
    assert [*attempts(folder)] == [1, 2, 3, 4]


def test_all_tiers_go_back(job_config: Path, folder: Path) -> None:
    shutil.copytree(folder / "run", folder / "slow")
    shutil.rmtree(step_of(folder, 2))
    slow = ("--save", folder / "slow")
    assert train(job_config, folder, 3, *slow, "--load", folder / "slow/step-000000002", "--rewind") == 0
    assert Run(folder / "slow").steps() == [1, 2, 3]
    assert Run(folder / "run").steps() == [1, 3]
    roots = {read_root(open_storage(folder / name), 3).attempt for name in ("run", "slow")}
    assert len(roots) == 1


@pytest.mark.parametrize("load", ["run", "elsewhere/step-000000001"])
def test_only_a_step_of_the_run_itself_is_gone_back_to(
    job_config: Path, folder: Path, capsys: pytest.CaptureFixture[str], load: str
) -> None:
    assert train(job_config, folder, 4, "--load", folder / load, "--rewind") == 2
    said = capsys.readouterr().err
    assert "--rewind goes back to a step of the run that is saved to" in said
    assert f"hint: --load {folder / 'run'}/step-000000100 --rewind" in said


def test_a_rewind_needs_a_step_and_a_run(job_config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("train", job_config, "--rewind") == 2
    assert "checkpoint.rewind needs checkpoint.load" in capsys.readouterr().err
