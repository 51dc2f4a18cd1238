"""Archiving: the same bytes with any number of workers and after any kill; other content is never touched."""

import json
import os
import subprocess
import sys
import uuid
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

import datakit
from datakit import unarchive, verify, write_store
from datakit.shards.store_source import StoreSource
from tests.datakit.conftest import begin_upload, files_of
from tests.datakit.support.archived import FRAME_BYTES, Killed, kill_after, make_archive, make_store
from threefold.errors import CheckFailed, StorageError, UserError
from threefold.storage import open_storage
from threefold.storage.object_store import PART_BYTES
from threefold.storage.stale_uploads import abort_stale_uploads
from tools.fault_proxy import Fault, FaultProxy

archive = partial(datakit.archive, frame_bytes=FRAME_BYTES)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("archiving") / "store").path


def contents(place: str) -> dict[str, bytes]:
    storage = open_storage(place)
    return {found.key: storage.read(found.key) for found in storage.list()}


def test_an_archive_is_the_stores_files_compressed_and_its_manifest(store: Path, tmp_path: Path) -> None:
    summary = archive(store, str(tmp_path / "a"))
    archived_files, sound = files_of(tmp_path / "a"), files_of(store)
    assert archived_files.pop("manifest.json") == sound.pop("manifest.json")
    record = json.loads(archived_files.pop("archive.json"))
    assert record["frame_bytes"] == FRAME_BYTES
    assert archived_files.keys() == {f"{name}.zst" for name in sound}
    for name, content in sound.items():
        stream = zstandard.ZstdDecompressor().stream_reader(archived_files[f"{name}.zst"], read_across_frames=True)
        assert stream.read() == content
    assert (summary.num_files, summary.num_kept) == (9, 0)
    assert summary.size_bytes == sum(map(len, sound.values()))
    assert summary.packed_bytes == sum(map(len, archived_files.values()))


@given(
    lengths=st.lists(st.one_of(st.integers(0, 3), st.sampled_from([255, 256, 257, 512, 1000])), max_size=8),
    shard_documents=st.integers(1, 4),
    vocab_size=st.sampled_from([9, 70_000]),
    num_workers=st.integers(1, 3),
)
def test_any_store_comes_back_byte_for_byte(
    tmp_path: Path, lengths: list[int], shard_documents: int, vocab_size: int, num_workers: int
) -> None:
    folder = tmp_path / uuid.uuid4().hex
    rng = np.random.default_rng(sum(lengths))
    documents = [rng.integers(0, vocab_size, length) for length in lengths]
    store = write_store(folder / "s", documents, vocab_size=vocab_size, shard_documents=shard_documents)
    archive(store.path, str(folder / "a"), num_workers=num_workers)
    assert not verify(folder / "a")
    unarchive(str(folder / "a"), folder / "u", num_workers=num_workers)
    assert files_of(folder / "u") == files_of(store.path)
    source = StoreSource.open(str(folder / "a"))
    for file in source.files:
        sound = (store.path / file.name).read_bytes()
        start, stop = sorted(rng.integers(0, len(sound) + 1, 2).tolist())
        assert source.open_packed(file).read(start, stop) == sound[start:stop]


def test_any_number_of_workers_gives_the_same_bytes(store: Path, tmp_path: Path) -> None:
    for num_workers in (1, 2, 12):
        archive(store, str(tmp_path / str(num_workers)), num_workers=num_workers)
    first, *others = (files_of(tmp_path / str(num_workers)) for num_workers in (1, 2, 12))
    assert all(other == first for other in others)


@pytest.mark.parametrize("skip", range(21))
def test_an_archive_killed_at_any_write_is_continued(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skip: int
) -> None:
    whole, place = tmp_path / "whole", str(tmp_path / "a")
    make_archive(store, str(whole))
    with monkeypatch.context() as patch:
        # a plan, nine files with a note each, the manifest, the record
        kill_after(skip, patch)
        with pytest.raises(Killed):
            archive(store, place)
    if skip:
        for reader in (StoreSource.open, verify, lambda place: unarchive(place, tmp_path / "u")):
            with pytest.raises(UserError, match="is unfinished"):
                reader(place)
    if skip > 1:  # before, there is the plan alone
        with pytest.raises(UserError, match="begun from other sources or in another way"):
            archive(store, place, level=5)
    left = {name: os.stat(tmp_path / "a" / name).st_ino for name in files_of(tmp_path / "a") if name.endswith(".zst")}
    summary = archive(store, place)
    assert summary.num_kept == max(skip - 1, 0) // 2 if skip < 20 else 9
    assert files_of(tmp_path / "a") == files_of(whole)
    kept = [name for name, inode in left.items() if os.stat(tmp_path / "a" / name).st_ino == inode]
    assert len(kept) == summary.num_kept


def test_a_kill_after_the_commit_is_tidied(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("datakit.format.output.Output.remove_work", kill)
        with pytest.raises(Killed):
            archive(store, str(tmp_path / "a"))
    assert (tmp_path / "a" / ".work").is_dir()
    assert not verify(tmp_path / "a")
    before = (tmp_path / "a" / "archive.json").stat().st_ino
    assert archive(store, str(tmp_path / "a")).num_kept == 9
    assert (tmp_path / "a" / "archive.json").stat().st_ino == before
    assert not (tmp_path / "a" / ".work").exists()


ROOT = Path(__file__).parents[3]
KILLED = """
import os, signal, sys
from datakit import archive
from datakit.store.archiving import FileThreads
def until_killed(self, blocks):
    for block in blocks:
        yield block
        os.kill(os.getpid(), signal.SIGKILL)
FileThreads.until_ended = until_killed
archive(sys.argv[1], sys.argv[2], frame_bytes=512)
"""


def test_a_kill_in_the_middle_of_a_file_leaves_nothing_half(store: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, store, tmp_path / "a"], check=False, cwd=ROOT)
    assert done.returncode == -9
    assert list((tmp_path / "a").glob(".shard*.tmp"))
    (tmp_path / "a" / ".mine.0.tmp").touch()
    assert not list((tmp_path / "a").glob("shard*"))
    archive(store, str(tmp_path / "a"))
    names = {"manifest.json", "archive.json", ".mine.0.tmp"}
    names |= {f"{name}.zst" for name in files_of(store) if name != "manifest.json"}
    assert {path.name for path in (tmp_path / "a").iterdir()} == names


@pytest.mark.parametrize("change", ["shorter", "no JSON", "no note", "other size"])
def test_a_file_without_a_fitting_note_is_made_again(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    with monkeypatch.context() as patch:
        kill_after(20, patch)
        with pytest.raises(Killed):
            archive(store, str(tmp_path / "a"))
    file = tmp_path / "a" / "shard-000001-000.bin.zst"
    note = tmp_path / "a" / ".work" / "shard-000001-000.bin.zst.json"
    match change:
        case "shorter":
            file.write_bytes(file.read_bytes()[:-1])
        case "no JSON":
            note.write_bytes(b"{")
        case "no note":
            note.unlink()
        case "other size":
            note.write_bytes(b'{"size_bytes": 1, "xxh3_64": "0"}')
    assert archive(store, str(tmp_path / "a")).num_kept == 8
    assert not verify(tmp_path / "a")


def test_a_destination_that_holds_something_else_is_refused_and_kept(store: Path, tmp_path: Path) -> None:
    other = write_store(tmp_path / "other", [[1, 2]], vocab_size=9).path
    archive(other, str(tmp_path / "a"))
    with pytest.raises(UserError, match="holds an archive of another store"):
        archive(store, str(tmp_path / "a"))
    with pytest.raises(UserError, match="holds an archive of another store or made in another way"):
        archive(other, str(tmp_path / "a"), level=4)
    with pytest.raises(UserError, match=r"is not empty: it holds manifest\.json"):
        archive(store, str(other))
    before = files_of(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "shard-000000-000.bin.zst").write_bytes(b"mine")
    with pytest.raises(UserError, match=r"is not empty: it holds shard-000000-000\.bin\.zst"):
        archive(store, str(tmp_path / "mine"))
    with pytest.raises(UserError, match=r"is not empty: it holds a/archive\.json"):
        archive(store, str(tmp_path))
    assert files_of(tmp_path) == before | {"mine/shard-000000-000.bin.zst": b"mine"}
    with pytest.raises(UserError, match="is not a folder"):
        archive(store, str(tmp_path / "mine" / "shard-000000-000.bin.zst"))


def test_foreign_content_in_an_unfinished_archive_is_refused(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        kill_after(4, patch)
        with pytest.raises(Killed):
            archive(store, str(tmp_path / "a"))
    (tmp_path / "a" / "thesis.txt").write_text("x")
    with pytest.raises(UserError, match=r"it holds thesis\.txt"):
        archive(store, str(tmp_path / "a"))


def test_a_complete_archive_that_lost_a_file_is_told(store: Path, tmp_path: Path) -> None:
    archive(store, str(tmp_path / "a"))
    (tmp_path / "a" / "shard-000001-000.bin.zst").unlink()
    with pytest.raises(CheckFailed, match=r"shard-000001-000\.bin\.zst has no bytes, archive\.json says"):
        archive(store, str(tmp_path / "a"))


@pytest.mark.parametrize("kind", ["local", "fsspec", "s3"])
def test_a_damaged_store_is_not_archived(tmp_path: Path, request: pytest.FixtureRequest, kind: str) -> None:
    place = request.getfixturevalue("s3_url") if kind == "s3" else str(tmp_path / "a")
    place = f"memory://{uuid.uuid4().hex}" if kind == "fsspec" else place
    damaged = make_store(tmp_path / "s").path
    file = damaged / "shard-000001-000.bin"
    sound = file.read_bytes()
    file.write_bytes(b"X" + sound[1:])
    with pytest.raises(CheckFailed, match=f"{file} is damaged: its checksum does not hold") as caught:
        archive(damaged, place)
    assert caught.value.hint == f"datakit verify {damaged}"
    assert "shard-000001-000.bin.zst" not in contents(place)
    file.write_bytes(sound)
    archive(damaged, place)
    assert not verify(place)


def test_a_damaged_large_file_is_not_uploaded_to_s3(tmp_path: Path, s3_url: str) -> None:
    """In three parts: the fault comes up in the middle of the client's upload."""
    archive = partial(datakit.archive, frame_bytes=1 << 20)
    tokens = np.random.default_rng(0).integers(0, 60_000, PART_BYTES + (1 << 20))  # of two bytes
    damaged = write_store(tmp_path / "s", [tokens], vocab_size=60_000).path
    file = damaged / "shard-000000-000.bin"
    sound = file.read_bytes()
    file.write_bytes(sound[:-1] + b"X")
    with pytest.raises(CheckFailed, match="its checksum does not hold"):
        archive(damaged, s3_url)
    assert not any(key.endswith(".bin.zst") for key in contents(s3_url))
    file.write_bytes(sound)
    archive(damaged, s3_url)
    unarchive(s3_url, tmp_path / "u")
    assert files_of(tmp_path / "u") == files_of(damaged)


def test_uploads_that_a_killed_run_left_are_aborted(store: Path, s3_url: str) -> None:
    begin_upload(f"{s3_url}/a/shard-000001-000.bin.zst")
    begin_upload(f"{s3_url}/a/mine.bin")
    archive(store, f"{s3_url}/a")
    assert abort_stale_uploads(open_storage(s3_url), older_than_s=-60.0) == ["a/mine.bin"]


@pytest.mark.parametrize("kind", ["file", "fsspec", "s3"])
def test_every_kind_of_place_gets_the_same_bytes(
    store: Path, tmp_path: Path, request: pytest.FixtureRequest, kind: str
) -> None:
    place = {"file": f"file://{tmp_path / 'b'}", "fsspec": f"memory://{uuid.uuid4().hex}"}.get(kind)
    place = place or request.getfixturevalue("s3_url")
    archive(store, str(tmp_path / "a"))
    archive(store, place, num_workers=3)
    assert contents(place) == files_of(tmp_path / "a")
    assert archive(store, place).num_kept == 9
    assert contents(place) == files_of(tmp_path / "a")


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["503", "reset"])
def test_an_archive_on_s3_survives_passing_faults_and_continues_after_lasting_ones(
    store: Path, tmp_path: Path, s3_proxy: FaultProxy, s3_url: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "3")
    monkeypatch.setenv("THREEFOLD_STORAGE_TIMEOUT_S", "2")
    s3_proxy.fault = Fault(kind, method="PUT", skip=7)
    with pytest.raises(StorageError, match="cannot write s3://"):
        archive(store, s3_url)
    s3_proxy.fault = Fault(kind, method="PUT", skip=1, times=1)
    summary = archive(store, s3_url)
    assert summary.num_kept == 3
    archive(store, str(tmp_path / "a"))
    assert contents(s3_url) == files_of(tmp_path / "a")


def test_a_full_disk_is_one_error_and_the_same_call_continues(store: Path, tmp_path: Path) -> None:
    program = (
        "import resource, signal, sys; from datakit import archive; "
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000)); "
        "archive(sys.argv[1], sys.argv[2], frame_bytes=512)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, store, tmp_path / "a"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert "threefold.errors.StorageError: cannot write" in done.stderr
    assert "shard-000001-000.bin.zst" in done.stderr
    assert not [name for name in files_of(tmp_path / "a") if name.endswith(".tmp")]
    assert archive(store, str(tmp_path / "a")).num_kept > 0
    assert not verify(tmp_path / "a")


def test_what_cannot_be_archived(store: Path, tmp_path: Path, s3_url: str) -> None:
    archive(store, str(tmp_path / "a"))
    for place in (str(tmp_path / "a"), s3_url):
        with pytest.raises(UserError, match="is not a token store in a local folder") as caught:
            archive(place, str(tmp_path / "b"))
        assert caught.value.hint == f"datakit unarchive {place} --output STORE"
    with pytest.raises(UserError, match="is not a token store"):
        archive(tmp_path, str(tmp_path / "b"))
    for frame_bytes in (0, (64 << 20) + 1):
        with pytest.raises(UserError, match=f"frames of {frame_bytes} bytes"):
            datakit.archive(store, str(tmp_path / "b"), frame_bytes=frame_bytes)
    for level in (0, 20, -1):
        with pytest.raises(UserError, match=f"there is no level {level}"):
            archive(store, str(tmp_path / "b"), level=level)
    assert not (tmp_path / "b").exists()


PEAK = """
import re, sys
from datakit import archive, unarchive
archive(sys.argv[1], sys.argv[2])
unarchive(sys.argv[2], sys.argv[3])
print(re.search(r"VmHWM:[^0-9]*([0-9]+) kB", open("/proc/self/status").read())[1])
"""


@pytest.mark.ci
@pytest.mark.slow
def test_memory_is_flat(tmp_path: Path) -> None:
    """Ten times the tokens, the same peak of memory there and back."""
    peaks = []
    for num_documents in (20, 200):
        folder, rng = tmp_path / str(num_documents), np.random.default_rng(0)
        write_store(folder / "s", (rng.integers(0, 60_000, 500_000) for _ in range(num_documents)), vocab_size=60_000)
        words = [sys.executable, "-c", PEAK, folder / "s", folder / "a", folder / "u"]
        peaks.append(int(subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT).stdout))
    assert peaks[1] < peaks[0] + 20_000, peaks
