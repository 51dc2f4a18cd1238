"""Every end of a run saves the last step that counts, whatever ends it, and never one that does not."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit.runs.catalogue import committed_steps
from datakit import Blend, Loader
from tests.trainer.support.training import ROOT, call, curve, lines
from threefold.errors import StorageError
from threefold.storage import open_storage
from trainer.checkpoint.saver import Saver
from trainer.data import StepReader
from trainer.engine import Engine
from trainer.job.whereabouts import RankLost
from trainer.model.microbatch import Batch
from trainer.run.evaluate import Evaluation
from trainer.store.store import ParameterStore
from trainer.verdict import PendingStats

Console = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
GONE = StorageError("the disk is gone", hint="mount it")


def at(number: int, real: Callable[..., Any], fails: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is another one from its call of this number on, counted from 1."""
    calls = 0

    def call_it(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        return (fails if calls >= number else real)(*arguments, **named)

    return call_it


def raises(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


def a_batch_that_is_not_finite(patch: Patch) -> None:
    start_step = Engine.start_step

    def start(self: Engine, step: int, batch: Batch, **named: Any) -> PendingStats:
        mask = batch.loss_mask * float("nan") if step == 3 else batch.loss_mask
        return start_step(self, step, replace(batch, loss_mask=mask), **named)

    patch.setattr(Engine, "start_step", start)


def a_read_that_fails(patch: Patch) -> None:
    patch.setattr(Loader, "step_at", at(4, Loader.step_at, raises(GONE)))


def a_token_outside_the_vocabulary(patch: Patch) -> None:
    next_step = StepReader.next_step

    def spoil(self: StepReader) -> Any:
        host = next_step(self)
        host.tokens[..., 0] = 61
        return host

    patch.setattr(StepReader, "next_step", at(4, next_step, spoil))


def no_memory(patch: Patch) -> None:
    patch.setattr(Engine, "_run", at(4, Engine._run, raises(torch.OutOfMemoryError("no memory left"))))


def a_fault_of_ours(patch: Patch) -> None:
    patch.setattr(ParameterStore, "finish_reduce", at(4, ParameterStore.finish_reduce, raises(AssertionError("why"))))


FAULTS = [a_batch_that_is_not_finite, a_read_that_fails, a_token_outside_the_vocabulary, no_memory, a_fault_of_ours]


def train(job_config: Path, tmp_path: Path, *flags: object) -> int:
    """Train 8 steps; the exit code, or that of a traceback."""
    try:
        return call(
            "train", job_config, "--train-steps", 8, "--save", tmp_path / "run", "--metrics", tmp_path / "m.jsonl",
            *flags,
        )  # fmt: skip
    except (RuntimeError, AssertionError):
        return 1


@pytest.mark.parametrize("when", [pytest.param("read at once", marks=[pytest.mark.slow, pytest.mark.ci]), "read late"])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_step_before_a_fault_is_saved_and_the_run_goes_on_from_it(
    fault: Callable[[Patch], None], when: str, job_config: Path, tmp_path: Path, request: pytest.FixtureRequest,
    capsys: Console,
) -> None:  # fmt: skip
    if when == "read late":
        request.getfixturevalue("reads_late")
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        assert train(job_config, tmp_path) != 0
    assert committed_steps(open_storage(tmp_path / "run")) == [3]
    assert list(curve(tmp_path / "m.jsonl")) == [1, 2, 3]
    capsys.readouterr()
    assert train(job_config, tmp_path) == 0
    assert "resumed from step 3 of" in capsys.readouterr().err
    whole = tmp_path / "whole.jsonl"
    assert call("train", job_config, "--train-steps", 8, "--metrics", whole) == 0
    assert curve(tmp_path / "m.jsonl") == curve(whole)  # the state that was saved is that after step 3


def test_a_fault_in_the_first_step_leaves_nothing_in_the_way_of_the_same_command(
    job_config: Path, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepReader, "next_step", raises(GONE))
        assert train(job_config, tmp_path) == 3
    assert committed_steps(open_storage(tmp_path / "run")) == []
    assert train(job_config, tmp_path) == 0


@pytest.mark.usefixtures("reads_late")
def test_failed_saves_end_a_run_with_the_state_of_the_step_that_had_begun(job_config: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Saver, "check", at(3, Saver.check, raises(GONE)))
        assert train(job_config, tmp_path) == 3
    assert committed_steps(open_storage(tmp_path / "run")) == [4]
    assert train(job_config, tmp_path) == 0
    whole = tmp_path / "whole.jsonl"
    assert call("train", job_config, "--train-steps", 8, "--metrics", whole) == 0
    assert curve(tmp_path / "m.jsonl") == curve(whole)


@pytest.mark.usefixtures("reads_late")
def test_a_step_that_may_wait_for_a_lost_rank_is_not_waited_for(
    job_config: Path, tmp_path: Path, monkeypatch: Patch, capsys: Console
) -> None:
    monkeypatch.setattr(PendingStats, "read", at(4, PendingStats.read, raises(AssertionError("waits for step 4"))))
    monkeypatch.setattr(Saver, "note_agreed", at(3, Saver.note_agreed, raises(RankLost("rank 1 is gone"))))
    assert train(job_config, tmp_path) == 3
    text = capsys.readouterr().err
    assert "rank 1 is gone" in text
    assert "waits for step 4" not in text
    assert committed_steps(open_storage(tmp_path / "run")) == []  # its state may be that of step 3 or of step 4


@pytest.mark.usefixtures("reads_late")
def test_a_save_of_the_interval_that_runs_is_the_last_good_one(
    job_config: Path, tmp_path: Path, monkeypatch: Patch, capsys: Console
) -> None:
    a_batch_that_is_not_finite(monkeypatch)
    assert train(job_config, tmp_path, "--save-interval", 3) == 2
    text = capsys.readouterr().err
    assert text.count("step 3 is saved") == 1
    assert "step 4: the loss is nan" in text
    assert committed_steps(open_storage(tmp_path / "run")) == [3]


def test_a_state_that_a_fault_left_half_changed_is_not_saved(
    job_config: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(ParameterStore, "update", at(4, ParameterStore.update, raises(RuntimeError("in the update"))))
    assert train(job_config, tmp_path, "--save-interval", 2) == 1
    assert committed_steps(open_storage(tmp_path / "run")) == [2]


def test_an_evaluation_that_cannot_read_ends_the_run_saved(
    job_config: Path, tmp_path: Path, monkeypatch: Patch, capsys: Console
) -> None:
    monkeypatch.setattr(Evaluation, "_host", at(2, Evaluation._host, raises(GONE)))
    assert train(job_config, tmp_path, "--train.eval-interval", 5) == 3
    assert "error: the disk is gone\nhint: mount it\n" in capsys.readouterr().err
    assert committed_steps(open_storage(tmp_path / "run")) == [5]


def test_an_evaluation_that_fails_otherwise_ends_the_run_saved(
    job_config: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(Engine, "eval_batch", raises(torch.OutOfMemoryError("no memory left")))
    assert train(job_config, tmp_path, "--train.eval-interval", 5) == 2
    assert committed_steps(open_storage(tmp_path / "run")) == [5]


def test_a_save_that_fails_at_the_end_is_said_and_the_fault_too(
    job_config: Path, tmp_path: Path, monkeypatch: Patch, capsys: Console
) -> None:
    monkeypatch.setattr(Blend, "batch", at(4, Blend.batch, lambda *_, **__: cut_off(tmp_path / "run")))
    assert train(job_config, tmp_path, "--checkpoint.retry-s", 0) == 3
    text = capsys.readouterr().err
    assert "warning: step 3, the last good one, is not saved: 3 saves in a row to" in text
    assert text.endswith("error: the disk is gone\nhint: mount it\n")


def cut_off(run: Path) -> None:
    """Let no step be saved any more."""
    if not run.is_file():
        run.rmdir()
        run.write_text("")
    raise GONE


# on one rank alone, in its fourth step: what `job` raises, the others cannot know of
ALONE = """
import os, sys
from trainer.cli import main
from trainer.engine import Engine
real = Engine.start_step

def start(self, step, batch, **named):
    if step == 3 and os.environ["RANK"] == os.environ["FAILS"]:
        raise RuntimeError("no memory left on this rank")
    return real(self, step, batch, **named)

Engine.start_step = start
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("fails", ["0", "1"])
def test_what_one_rank_meets_alone_ends_all_at_a_step_that_is_saved(
    fails: str, job_config: Path, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(ALONE)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    flags = ["--train-steps", 8, "--save", tmp_path / "run", "--metrics", tmp_path / "m.jsonl"]
    command = [*launcher, tmp_path / "program.py", "train", job_config, *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "FAILS": fails}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "no memory left on this rank" in done.stderr
    deadline = 200
    while not (steps := committed_steps(open_storage(tmp_path / "run"))) and deadline:
        deadline -= 1
        signal.sigtimedwait([], 0.1)
    assert steps == [3], done.stderr
    assert list(curve(tmp_path / "m.jsonl")) == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.ci
def test_the_last_step_is_evaluated_and_saved_with_it(job_config: Path, tmp_path: Path) -> None:
    assert train(job_config, tmp_path, "--train.eval-interval", 5) == 0
    assert [line["step"] for line in lines(tmp_path / "m.jsonl", "eval")] == [5, 8]
    assert call("train", job_config, "--train-steps", 8, "--save", tmp_path / "run", "--train.eval-interval", 5) == 0
