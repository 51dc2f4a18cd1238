"""Striping: how many stripes for which files, and what a stand-in `lfs` is told."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.io.striping import MAX_STRIPES, MAX_STRIPES_IN_ALL, STRIPE_SIZE_UNIT, Striper, Striping, choose_striping
from ckptkit.saving.checkpointer import Checkpointer, CheckpointerOptions
from tests.ckptkit.support.saves import SMALL, save_one
from threefold.errors import StorageError, UserError
from threefold.storage import open_storage

GIB = 1 << 30


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, then: str = "exit 0") -> Path:
    """Put a program `lfs` first on PATH that notes its arguments in the file returned."""
    (folder / "bin").mkdir()
    program, calls = folder / "bin" / "lfs", folder / "calls"
    program.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n{then}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    return calls


@given(file_bytes=st.integers(0, 1 << 45), num_writers=st.integers(1, 5000))
def test_stripes_are_few_for_many_writers_and_more_for_large_files(file_bytes: int, num_writers: int) -> None:
    chosen = choose_striping(file_bytes, num_writers)
    assert 1 <= chosen.count <= MAX_STRIPES
    assert chosen.size_bytes % STRIPE_SIZE_UNIT == 0
    assert chosen.count == 1 or chosen.count * num_writers <= MAX_STRIPES_IN_ALL
    assert chosen.count <= choose_striping(2 * file_bytes, num_writers).count
    assert chosen.count >= choose_striping(file_bytes, 2 * num_writers).count


def test_what_is_given_is_taken() -> None:
    assert choose_striping(100 * GIB, 1).count == MAX_STRIPES
    assert choose_striping(100 * GIB, 64).count == 2
    assert choose_striping(100 * GIB, 4096).count == 1
    assert choose_striping(100 * GIB, 4096, stripe_count=-1, stripe_size_bytes=1 << 20) == Striping(-1, 1 << 20)


@pytest.mark.parametrize(("count", "size"), [(-2, 0), (1, 100), (1, -65536)])
def test_what_no_file_can_have_is_refused(count: int, size: int) -> None:
    with pytest.raises(UserError, match=f"no file has {count} stripes of {size} bytes"):
        CheckpointerOptions(stripe_count=count, stripe_size_bytes=size)


def test_the_folder_of_the_files_is_set_before_they_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = stand_in(tmp_path, monkeypatch, then='[ -d "$6" ] && [ -z "$(ls "$6")" ]')
    told: list[str] = []
    Striper(warn=told.append).prepare(open_storage(tmp_path / "run"), "step/a/part-0", 20 * GIB, 1)
    assert calls.read_text() == f"setstripe -c 10 -S {16 << 20} {tmp_path}/run/step/a\n"
    assert told == []


def test_a_failing_lfs_is_told_once_and_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = stand_in(tmp_path, monkeypatch, then="echo no such pool >&2; exit 2")
    told: list[str] = []
    striper = Striper(4, 1 << 20, told.append)
    for name in "ab":
        striper.prepare(open_storage(tmp_path / "run"), f"{name}/part-0", GIB, 1)
    assert told == [f"cannot set the striping of {tmp_path}/run/a: {tmp_path}/bin/lfs setstripe -c 4 -S {1 << 20} "
                    f"{tmp_path}/run/a: no such pool"]  # fmt: skip
    assert len(calls.read_text().splitlines()) == 1


def test_a_folder_on_another_file_system_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = stand_in(tmp_path, monkeypatch, then="echo 'setstripe: Inappropriate ioctl for device' >&2; exit 25")
    told: list[str] = []
    striper = Striper(warn=told.append)
    striper.prepare(open_storage("memory://x"), "a/part-0", GIB, 1)
    assert not calls.exists()
    striper.prepare(open_storage(tmp_path), "a/part-0", GIB, 1)
    assert calls.exists()
    assert told == []


def test_a_save_sets_its_folder_and_tells_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = stand_in(tmp_path, monkeypatch, then="echo quota >&2; exit 1")
    options = CheckpointerOptions(stripe_count=3, stripe_size_bytes=1 << 20)
    with Checkpointer(str(tmp_path / "run"), attempt="a", options=options) as checkpointer:
        reports = []
        for step in (1, 2):
            save_one(checkpointer, step, SMALL)
            reports += checkpointer.wait()
    assert calls.read_text() == f"setstripe -c 3 -S {1 << 20} {tmp_path}/run/step-000000001/a-0001\n"
    assert all(report.ok for report in reports)
    assert reports[0].warning.startswith("cannot set the striping of")
    assert not reports[1].warning


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="cannot write"):
        Striper().prepare(open_storage(tmp_path / "file"), "a/part-0", GIB, 1)
