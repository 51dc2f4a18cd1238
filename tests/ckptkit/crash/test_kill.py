"""A writer killed before any of its system calls: every listed step is whole, and the next saves work."""

import itertools
from pathlib import Path

import pytest

from ckptkit.runs.catalogue import committed_steps
from ckptkit.runs.retention import Retention
from ckptkit.saving.checkpointer import Checkpointer, CheckpointerOptions
from tests.ckptkit.support.saves import SMALL, Injection, assert_holds, newest_good, remove_remains, save_one
from threefold.storage import open_storage

# A kill comes before its call is made, so the kills at calls that change something meet every state of the disk.
FAST = ["linkat"]
SLOW = ["pwrite64", "renameat", "mkdirat", "openat", "fallocate", "write", "fsync", "unlinkat"]


@pytest.mark.ci
@pytest.mark.parametrize("call", [*FAST, *(pytest.param(call, marks=pytest.mark.slow) for call in SLOW)])
def test_a_writer_killed_at_any_call_leaves_each_step_whole_or_unlisted(tmp_path: Path, call: str) -> None:
    storage, was_committed = open_storage(tmp_path), []
    options = CheckpointerOptions(
        retention=Retention(keep_last=2)
    )  # each save deletes an older step once it is committed
    with Checkpointer(str(tmp_path), attempt="a", options=options) as checkpointer:
        for step in (1, 2, 3):
            save_one(checkpointer, step, SMALL, scale=step)
            assert checkpointer.wait()[0].ok
        for number in itertools.count(1):
            last, step = step, 10 * number
            with Injection(checkpointer.writer_pid, f"{call}:signal=KILL:when={number}"):
                save_one(checkpointer, step, SMALL, scale=step)
                report = checkpointer.wait()[0]
            if report.ok:
                break  # it makes no more such calls
            assert report.error == f"rank 0: the writer process was killed by SIGKILL while it saved step {step}"
            for listed in committed_steps(storage):
                assert_holds(tmp_path, listed, SMALL, scale=listed)
            was_committed.append(newest_good(tmp_path, SMALL) == step)
            assert was_committed[-1] or newest_good(tmp_path, SMALL) == last

            save_one(checkpointer, step, SMALL, scale=step)
            report = checkpointer.wait()[0]
            assert report.ok or (was_committed[-1] and "is committed already" in report.error)
            assert newest_good(tmp_path, SMALL) == step
            step += 1
            save_one(checkpointer, step, SMALL, scale=step)
            assert checkpointer.wait()[0].ok
            assert newest_good(tmp_path, SMALL) == step
            remove_remains(tmp_path)  # each is one more folder to list, the number of calls would ever grow
    assert was_committed, "it made such calls"
    assert was_committed == sorted(was_committed), "once committed, committed whatever comes"
    assert was_committed[-1] is (call not in ("mkdirat", "fallocate", "pwrite64", "renameat", "linkat"))
