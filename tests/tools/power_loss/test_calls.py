"""What a program did to its files is read from strace's log."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.strace import needs_strace
from threefold.errors import StorageError
from tools.power_loss.calls import Call, calls_of, record
from tools.power_loss.disk import replay, tree_of

PROGRAM = """
import os, sys, threading
folder = sys.argv[1]
at = os.open(folder, os.O_RDONLY)
here = {"dir_fd": at}
both = {"src_dir_fd": at, "dst_dir_fd": at}
file = os.open('a, "b"', os.O_CREAT | os.O_WRONLY, **here)
os.write(file, b"0123456789" * 1000)
os.pwrite(file, b"xy", 4095)
os.writev(file, [b"tail", b"", b"end"])
os.link('a, "b"', folder + "/c", src_dir_fd=at)
os.unlink('a, "b"', **here)
os.fsync(file)
os.posix_fallocate(file, 0, 20_000)
os.ftruncate(file, 15_000)
os.mkdir("d", **here)
os.rename("c", "d/e", **both)
os.lseek(file, 3, os.SEEK_SET)
os.write(file, b"three")
copy = os.open("d/f", os.O_CREAT | os.O_RDWR, **here)
os.copy_file_range(os.open("d/e", os.O_RDONLY, **here), copy, 5000)
log = os.open(folder + "/log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
threads = [threading.Thread(target=os.write, args=(log, b"line\\n")) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
os.rename(folder + "/d", folder + "/g")
os.mkdir(folder + "/gone")
os.rmdir(folder + "/gone")
os.fsync(at)
print("ACKNOWLEDGED all of it", flush=True)
"""


@needs_strace
def test_a_replay_ends_as_the_program_did(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    (folder / "before").write_bytes(b"it was there")
    before = tree_of(folder)
    calls = record([sys.executable, "-c", PROGRAM, str(folder)], tmp_path / "calls", cwd=tmp_path)
    recording = replay(calls, folder, before)
    after = tree_of(folder)
    assert after.keys() == {"before", "g", "g/e", "g/f", "log"}
    assert recording.tree(range(len(recording.changes))) == after
    assert recording.tree(()) == before
    assert [text for _, text, _ in recording.promises] == ["all of it"]
    assert [sync.name for sync in recording.syncs] == ['a, "b"', "."]


@needs_strace
def test_what_cannot_be_replayed_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    program = f"import mmap; f = open({str(folder / 'a')!r}, 'wb+'); f.write(b'1'); f.flush(); mmap.mmap(f.fileno(), 1)"
    calls = record([sys.executable, "-c", program], tmp_path / "calls", cwd=tmp_path)
    with pytest.raises(StorageError, match="a map of"):
        replay(calls, folder, {})


@needs_strace
def test_a_program_that_fails_is_no_recording(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError, match="status 3"):
        record([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "calls", cwd=tmp_path)


def test_calls_that_overlap_have_both_their_places() -> None:
    log = [
        r"7  fsync(3<\x2f\x72\x2f\x61> <unfinished ...>",
        r'8  openat(AT_FDCWD<\x2f\x72>, "\x62", O_WRONLY|O_CREAT, 0666) = 4<\x2f\x72\x2f\x62>',
        r"7  <... fsync resumed>) = 0",
        r"8  fsync(4<\x2f\x72\x2f\x62>(deleted)) = -1 EIO (Input/output error)",
        r'8  write(1<pipe:[5]>, "\x41\x43\x4b\x4e\x4f\x57\x4c\x45\x44\x47\x45\x44\x20\x78\x0a", 15) = 15',
    ]
    assert list(calls_of(log, "/")) == [
        Call("create", 1, 1, "/r/b", flags="O_WRONLY|O_CREAT"),
        Call("sync", 0, 2, "/r/a"),
        Call("say", 4, 4, data=b"x"),
    ]


WRITES = "import sys; from threefold.storage import open_storage; open_storage(sys.argv[1]).write('a/b', b'x')"


@needs_strace
def test_who_calls_each_fsync_is_known_also_in_a_child(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WRITES!r}, sys.argv[1]], check=True)"
    calls = record([sys.executable, "-c", child, str(folder)], tmp_path / "calls", cwd=Path(__file__).parents[3])
    syncs = replay(calls, folder, {}).syncs
    publish = "local.LocalStorage.write > new_file.NewFile.publish"
    assert {sync.by for sync in syncs if sync.name.endswith(".tmp")} == {publish}
    assert all(sync.by.startswith("local.LocalStorage.write > ") for sync in syncs)
    without = replay(calls, folder, {}).without(publish).syncs
    assert 0 < len(without) < len(syncs)
