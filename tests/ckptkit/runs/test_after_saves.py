"""What the writer of a Checkpointer records of a save, and what it prunes after it."""

import socket
import time
from pathlib import Path

import pytest

from ckptkit.loading.roots import read_root
from ckptkit.runs.catalogue import committed_steps, pin
from ckptkit.runs.pruning import Pruner
from ckptkit.runs.retention import Retention
from ckptkit.saving.checkpointer import Checkpointer, CheckpointerOptions
from tests.ckptkit.support.saves import SMALL, save_one
from tests.ckptkit.support.steps import LAST, Watched, write_steps
from threefold.errors import StorageError
from threefold.storage import open_storage
from threefold.storage.request_log import Answer, LoggingStorage
from tools.fault_proxy import Fault, FaultProxy


def test_pinned_and_best_steps_stay_after_newer_commits(tmp_path: Path) -> None:
    options = CheckpointerOptions(retention=Retention(keep_last=1, keep_best=1, metric="loss"))
    with Checkpointer(str(tmp_path), attempt="a", options=options) as checkpointer:
        for step, loss in enumerate([3.0, 1.0, 2.0, float("nan")]):
            save_one(checkpointer, step, SMALL, loss=loss)
            assert [(report.ok, report.warning) for report in checkpointer.wait()] == [(True, "")]
            if step == 0:
                pin(open_storage(tmp_path), 0)
    assert committed_steps(open_storage(tmp_path)) == [0, 1, 3]


def test_a_failure_to_prune_is_a_warning_and_no_failed_save(
    s3_proxy: FaultProxy, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    monkeypatch.setenv("THREEFOLD_STORAGE_TIMEOUT_S", "2")
    options = CheckpointerOptions(retention=Retention(keep_last=1), max_failed_saves=1)
    with Checkpointer(s3_url, attempt="a", options=options) as checkpointer:
        s3_proxy.fault = Fault("503", method="POST")  # deletions
        for step in (1, 2):
            save_one(checkpointer, step, SMALL)
            (report,) = checkpointer.wait()
            assert report.ok
        assert report.warning.startswith("older steps were not pruned: cannot delete")
        s3_proxy.fault = Fault()
        save_one(checkpointer, 3, SMALL)
        assert checkpointer.wait()[0].warning == ""
    assert committed_steps(open_storage(s3_url)) == [3]


def test_the_root_records_the_save(tmp_path: Path) -> None:
    before = time.time()
    with Checkpointer(str(tmp_path), attempt="a", options=CheckpointerOptions(code="v7 größe")) as checkpointer:
        save_one(checkpointer, 1, SMALL)
        (report,) = checkpointer.wait()
    saved = read_root(open_storage(tmp_path), 1).saved
    assert saved is not None
    assert before - 0.001 <= saved.saved_at <= time.time()
    assert (saved.host, saved.code) == (socket.gethostname(), "v7 größe")
    assert 0 < saved.write_s + saved.commit_s <= report.write_s + 1e-6


def test_after_a_save_only_what_is_new_is_read(tmp_path: Path) -> None:
    answers: list[Answer] = []
    storage = LoggingStorage(open_storage(tmp_path), answers.append)
    pruner, policy = Pruner(), Retention(keep_last=3)
    for step in range(1, 7):
        write_steps(storage, step)
        answers.clear()
        assert pruner.after_save(storage, step, policy) == ""
        read = {answer.request.keys[0] for answer in answers if answer.request.operation == "read"}
        assert read - {f"step-{step - 3:09d}/root.json"} == {f"step-{step:09d}/root.json"}  # the other before it goes
    assert committed_steps(storage) == [4, 5, 6]


def test_after_a_save_that_is_not_whole_nothing_goes(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    write_steps(storage, 1, 2, 3)
    (tmp_path / "step-000000003/a1/part-00000.index").unlink()
    assert "a1/part-00000.index is missing" in Pruner().after_save(storage, 3, LAST)
    assert "step 4 is not listed" in Pruner().after_save(storage, 4, LAST)
    assert Pruner().after_save(storage, 3, Retention()) == ""
    assert committed_steps(storage) == [1, 2, 3]


@pytest.mark.parametrize("error", [StorageError("disk on fire"), ZeroDivisionError("ours")])
def test_a_failure_to_prune_is_a_warning(tmp_path: Path, error: Exception) -> None:
    storage = Watched(tmp_path)
    write_steps(storage, 1, 2)

    def fail(deleted: list[str]) -> None:
        raise error

    storage.before = fail
    warning = Pruner().after_save(storage, 2, LAST)
    assert warning.startswith("older steps were not pruned: ")
    assert str(error) in warning
