"""One way to hold an output for all kits: a lock of this machine's processes, and a note that says whose it is."""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from threefold.claim import Note, folder_held, take_lock, this_call, this_process
from threefold.errors import CheckFailed, UserError
from threefold.storage import open_storage

ROOT = Path(__file__).parents[2]


def held_elsewhere(path: str, is_shared: bool) -> bool:
    """Whether another process gets a lock."""
    descriptor = os.open(path, os.O_RDONLY)
    return take_lock(descriptor, is_shared=is_shared)


def another_gets(path: Path, *, is_shared: bool) -> bool:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(held_elsewhere, (str(path), is_shared))


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_lock_is_one_processs_unless_all_share_it(tmp_path: Path, is_shared: bool) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    assert take_lock(descriptor, is_shared=is_shared)
    assert another_gets(tmp_path, is_shared=True) is is_shared
    assert not another_gets(tmp_path, is_shared=False)
    os.close(descriptor)
    assert another_gets(tmp_path, is_shared=False)


def test_patience_outlasts_a_process_that_ends(tmp_path: Path) -> None:
    lock = "fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)"
    program = f"import fcntl, os, sys; {lock}; print(1, flush=True); input()"
    other = subprocess.Popen(
        [sys.executable, "-c", program, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "1\n"
    descriptor = os.open(tmp_path, os.O_RDONLY)
    assert not take_lock(descriptor)
    other.communicate("\n")
    assert take_lock(descriptor, patience_s=30)
    os.close(descriptor)


def test_a_folder_that_is_held_is_refused_to_others_and_goes_if_nothing_was_made(tmp_path: Path) -> None:
    storage = open_storage(tmp_path / "run")
    with folder_held(storage, "step/attempt", is_shared=False):
        assert (tmp_path / "run/step/attempt").is_dir()
        other = folder_held(storage, "step/attempt", is_shared=True)  # another descriptor is as another process
        with pytest.raises(UserError, match="another process writes the same"), other:
            pass
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("key", ["run", "by"])
def test_a_note_comes_back_with_its_call(key: str) -> None:
    note = Note({"root": "ab", "files": {"é": 1 << 40}}, this_call())
    assert Note.parse("note", note.encode(key), key) == note
    assert Note.parse("note", b'{"root": 1}', key) == Note({"root": 1}, "")
    for damaged in (b"", b"[1]", b"{", b"7", b"\xff"):
        with pytest.raises(CheckFailed, match="note is damaged"):
            Note.parse("note", damaged, key)


def test_each_call_has_a_name_of_its_own_that_names_its_process() -> None:
    names = {this_call() for _ in range(100)}
    assert len(names) == 100
    assert all(name.startswith(f"{this_process()}:") for name in names)


def test_outputs_are_claimed_in_one_place() -> None:
    kits = ("datakit", "ckptkit", "threefold", "trainer")
    files = [path for kit in kits for path in (ROOT / kit).rglob("*.py") if "LOCK_NB" in path.read_text()]
    cache = "datakit/shards/cache_folder.py"  # many processes use it at once: nobody makes it alone
    assert {str(path.relative_to(ROOT)) for path in files} - {cache} == {"threefold/claim.py"}
