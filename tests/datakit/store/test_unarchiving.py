"""Unarchiving: the store byte for byte, from an archive or a plain store; damage and kills leave nothing half."""

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

import pytest

from datakit import TokenStore, archive, unarchive, verify
from datakit.format.output import Output
from datakit.shards.store_source import StoreSource
from tests.datakit.conftest import files_of
from tests.datakit.support.archived import Killed, failing, make_archive, make_store
from threefold.errors import CheckFailed, StorageError, UserError
from threefold.storage import open_storage
from tools.fault_proxy import Fault, FaultProxy

pytestmark = pytest.mark.usefixtures("short_pauses")


@pytest.mark.parametrize("kind", ["store", "archive"])
@pytest.mark.parametrize("place", ["folder", "memory", "s3"])
@pytest.mark.parametrize("num_workers", [1, 4])
def test_the_store_comes_back_from_everywhere(
    archived: Path, tmp_path: Path, request: pytest.FixtureRequest, kind: str, place: str, num_workers: int
) -> None:
    url = str(archived / kind)
    if place != "folder":
        url = request.getfixturevalue("s3_url") if place == "s3" else f"memory://{uuid.uuid4().hex}"
        storage = open_storage(url)
        for name, content in files_of(archived / kind).items():
            storage.write(name, content)
    store = unarchive(url, tmp_path / "u", num_workers=num_workers)
    assert files_of(tmp_path / "u") == files_of(archived / "store")
    assert store.fingerprint == TokenStore.open(archived / "store").fingerprint
    assert not verify(tmp_path / "u")


@pytest.mark.parametrize("steps", range(11))
def test_one_killed_after_any_file_is_continued(
    archived: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """Begun from the archive, it may be continued from the store: the bytes are the same."""
    adopt, left, output = Output.adopt, steps, tmp_path / "u"

    def adopt_some(self: Output, folder: str, files: Sequence[Path]) -> None:
        nonlocal left
        if not left:
            raise Killed
        left -= 1
        adopt(self, folder, files)

    def kill(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Output, "adopt", adopt_some)
        patch.setattr(Output, "write" if steps < 10 else "remove_work", kill)
        with pytest.raises(Killed):
            unarchive(str(archived / "archive"), output)
    placed = {path.name: path.stat().st_ino for path in output.glob("shard*")}
    assert len(placed) == min(steps, 9)
    if steps < 10:
        with pytest.raises(UserError, match="is unfinished"):
            TokenStore.open(output)
    unarchive(str(archived / ("store" if steps % 2 else "archive")), output)
    assert files_of(output) == files_of(archived / "store")
    assert {name: (output / name).stat().st_ino for name in placed} == placed


def test_a_complete_one_is_left_alone_and_another_refused(archived: Path, tmp_path: Path) -> None:
    unarchive(str(archived / "archive"), tmp_path / "u")
    before = {path.name: os.stat(path).st_ino for path in (tmp_path / "u").iterdir()}
    unarchive(str(archived / "archive"), tmp_path / "u")
    assert {path.name: os.stat(path).st_ino for path in (tmp_path / "u").iterdir()} == before
    other = make_store(tmp_path / "other").path
    manifest = TokenStore.open(other).manifest
    (other / "manifest.json").write_bytes(manifest.encode().replace(b"\n", b"\n "))  # the same content, other bytes
    with pytest.raises(UserError, match="is not empty"):
        unarchive(str(archived / "archive"), other)
    with pytest.raises(UserError, match="is not empty"):
        unarchive(str(archived / "archive"), archived / "archive")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "x").touch()
    with pytest.raises(UserError, match="is not empty: it holds x"):
        unarchive(str(archived / "archive"), tmp_path / "mine")


@pytest.mark.parametrize("kind", ["store", "archive"])
def test_damage_is_told_and_what_was_fetched_is_kept(archived: Path, tmp_path: Path, kind: str) -> None:
    shutil.copytree(archived / kind, tmp_path / "x")
    file = tmp_path / "x" / f"shard-000001-000.idx{'.zst' if kind == 'archive' else ''}"
    sound = file.read_bytes()
    file.write_bytes(sound[:40] + bytes([sound[40] ^ 1]) + sound[41:])
    with pytest.raises(CheckFailed, match=str(file)):
        unarchive(str(tmp_path / "x"), tmp_path / "u")
    placed = {path.name: path.stat().st_ino for path in (tmp_path / "u").glob("shard*")}
    assert len(placed) == 4
    file.write_bytes(sound)
    unarchive(str(tmp_path / "x"), tmp_path / "u")
    assert files_of(tmp_path / "u") == files_of(archived / "store")
    assert {name: (tmp_path / "u" / name).stat().st_ino for name in placed} == placed


def test_a_read_that_fails_for_good_is_one_error_and_the_same_call_continues(
    archived: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("datakit.shards.store_source.open_repeating", lambda url: failing(url, "read_ranges", after=9))
        with pytest.raises(StorageError, match="no read_ranges"):
            unarchive(str(archived / "archive"), tmp_path / "u", num_workers=2)
    assert list((tmp_path / "u").glob("shard*"))
    unarchive(str(archived / "archive"), tmp_path / "u")
    assert files_of(tmp_path / "u") == files_of(archived / "store")


@pytest.mark.ci
@pytest.mark.slow
def test_an_s3_server_that_goes_away_and_comes_back(
    archived: Path, tmp_path: Path, s3_proxy: FaultProxy, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    make_archive(archived / "store", s3_url)
    s3_proxy.fault = Fault("503", skip=15)
    with pytest.raises(StorageError, match="answered 503"):
        unarchive(s3_url, tmp_path / "u")
    s3_proxy.fault = Fault("reset", method="GET", skip=3, times=2, after_bytes=50)
    unarchive(s3_url, tmp_path / "u")
    assert files_of(tmp_path / "u") == files_of(archived / "store")


def test_a_full_disk_is_one_error_and_the_same_call_continues(archived: Path, tmp_path: Path) -> None:
    program = (
        "import resource, signal, sys; from datakit import unarchive; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000)); unarchive(sys.argv[1], sys.argv[2])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, archived / "archive", tmp_path / "u"], capture_output=True, text=True,
        check=False, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert "threefold.errors.StorageError: cannot write" in done.stderr
    assert "shard-000001-000.bin" in done.stderr
    unarchive(str(archived / "archive"), tmp_path / "u")
    assert files_of(tmp_path / "u") == files_of(archived / "store")


def test_an_archive_is_no_store_to_open(archived: Path) -> None:
    with pytest.raises(StorageError, match="cannot read") as caught:
        TokenStore.open(archived / "archive")
    assert caught.value.hint == f"datakit unarchive {archived / 'archive'} --output STORE"


def test_what_cannot_be_unarchived(tmp_path: Path, archived: Path) -> None:
    with pytest.raises(UserError, match="is not a token store or archive"):
        unarchive(str(tmp_path / "nothing"), tmp_path / "u")
    with pytest.raises(UserError, match="0 workers"):
        unarchive(str(archived / "archive"), tmp_path / "u", num_workers=0)
    assert not (tmp_path / "u").exists()


def test_an_archive_of_what_was_unarchived_is_the_same(archived: Path, tmp_path: Path) -> None:
    unarchive(str(archived / "archive"), tmp_path / "u")
    make_archive(tmp_path / "u", str(tmp_path / "a"))
    assert files_of(tmp_path / "a") == files_of(archived / "archive")
    archive(tmp_path / "u", str(tmp_path / "usual"))  # frames of the usual size
    assert StoreSource.open(str(tmp_path / "usual")).manifest == StoreSource.open(str(archived / "store")).manifest
