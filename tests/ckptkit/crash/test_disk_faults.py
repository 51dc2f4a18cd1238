"""Disks that are full, broken or gone: one save fails and says why, the older step stays, the next save works."""

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ckptkit.format.keys import ROOT_KEY
from ckptkit.runs.catalogue import committed_steps
from ckptkit.runs.retention import Retention
from ckptkit.saving.checkpointer import Checkpointer, CheckpointerOptions
from tests.ckptkit.support.saves import (
    ROOT,
    SMALL,
    Injection,
    assert_holds,
    newest_good,
    remove_remains,
    save_one,
    save_whole,
    strace,
)
from threefold.storage import open_storage

SAYS = {"ENOSPC": "No space left on device", "EIO": "Input/output error"}
FAULTS = [(c, "ENOSPC") for c in ("mkdirat", "openat", "fallocate", "pwrite64", "write", "fsync", "renameat", "linkat")]
READING = ("read", "getdents64")
FAULTS += [(c, "EIO") for c in ("pwrite64", "write", "fsync", "renameat", "linkat", "unlinkat", *READING)]
PIPES = ("read", "write")  # they may fail towards the trainer too
FAST = [("pwrite64", "ENOSPC")]


@pytest.mark.parametrize(
    ("call", "error"), [*FAST, *(pytest.param(*f, marks=pytest.mark.slow) for f in FAULTS if f not in FAST)]
)
def test_a_call_that_fails_fails_one_save_and_no_more(tmp_path: Path, call: str, error: str) -> None:
    storage, num_failed = open_storage(tmp_path), 0
    with Checkpointer(
        str(tmp_path), attempt="a", options=CheckpointerOptions(retention=Retention(keep_last=2))
    ) as checkpointer:
        for step in (1, 2, 3):
            save_one(checkpointer, step, SMALL, scale=step)
            assert checkpointer.wait()[0].ok
        # each call once, and each together with all that follow
        for when in (f"{number}{then}" for number in itertools.count(1) for then in ("", "+")):
            last, step = step, step + 10
            with Injection(checkpointer.writer_pid, f"{call}:error={error}:when={when}") as injection:
                save_one(checkpointer, step, SMALL, scale=step)
                report = checkpointer.wait()[0]
            if not injection.is_met:
                break
            num_failed += not report.ok
            told = str(tmp_path) in report.error and SAYS[error] in report.error
            told |= call in PIPES and "the writer process ended" in report.error
            assert report.ok or told, report.error
            for listed in committed_steps(storage):
                assert_holds(tmp_path, listed, SMALL, scale=listed)
            newest = newest_good(tmp_path, SMALL)
            assert newest == step or (newest == last and not report.ok)

            save_one(checkpointer, step, SMALL, scale=step)
            report = checkpointer.wait()[0]
            assert report.ok or (newest == step and "is committed already" in report.error)
            step += 1
            save_one(checkpointer, step, SMALL, scale=step)
            assert checkpointer.wait()[0].ok
            assert newest_good(tmp_path, SMALL) == step
            remove_remains(tmp_path)
    assert num_failed, "such a failure is told"


@pytest.mark.parametrize("resource", ["blocks", "inodes"])
def test_a_disk_that_is_full_at_any_point_fails_saves_until_there_is_room(small_disk: Path, resource: str) -> None:
    """One save after the other with one page, or one file, more to be had."""
    run, filler = small_disk / "run", small_disk / "filler"
    options = CheckpointerOptions(max_failed_saves=1000)
    with Checkpointer(str(run), attempt="a", options=options) as checkpointer:
        save_one(checkpointer, 1, SMALL)
        assert checkpointer.wait()[0].ok
        filler.mkdir()
        before = sorted(item.key for item in open_storage(run).list())
        for room in itertools.count(0):
            _leave(room, resource, filler)
            save_one(checkpointer, 2, SMALL, scale=2)
            report = checkpointer.wait()[0]
            if report.ok:
                break
            assert SAYS["ENOSPC"] in report.error
            assert "df -h" in report.error
            assert sorted(item.key for item in open_storage(run).list()) == before, "what was written made room again"
            assert newest_good(run, SMALL) == 1
        assert room > (20 if resource == "blocks" else 3)
        assert newest_good(run, SMALL) == 2
        shutil.rmtree(filler)
        save_one(checkpointer, 3, SMALL, scale=3)
        assert checkpointer.wait()[0].ok
    assert newest_good(run, SMALL) == 3


@pytest.mark.parametrize(
    ("file", "call"),
    [
        (ROOT_KEY, "read"),
        pytest.param("part-00000.index", "pread64", marks=pytest.mark.slow),
        ("part-00000.safetensors", "pread64"),
    ],
)
def test_what_a_disk_cannot_read_is_told_and_stays(tmp_path: Path, file: str, call: str) -> None:
    """A bad disk is damage, which a restart passes over; nothing of it is deleted."""
    save_whole(tmp_path, 1, SMALL)
    path = next(tmp_path.rglob(file))
    injected = strace(f"{call}:error=EIO:when=1")
    command = [*injected, "-P", str(path), sys.executable, "-m", "ckptkit", "hash", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {path} cannot be read (Input/output error)")
    assert newest_good(tmp_path, SMALL) == 1


def _leave(room: int, resource: str, filler: Path) -> None:
    """Let a disk have so many free pages, or inodes."""
    disk = os.statvfs(filler)
    if resource == "inodes":
        held = sorted(filler.iterdir())
        for spare in held[: max(room - disk.f_favail, 0)]:
            spare.unlink()
        for number in range(disk.f_favail - room):
            (filler / f"{len(held) + number}").touch()
        return
    with (filler / "pages").open("ab") as file:
        size = file.tell() + (disk.f_bavail - room) * disk.f_bsize
        file.truncate(min(size, file.tell()))
        os.posix_fallocate(file.fileno(), 0, max(size, 1))
