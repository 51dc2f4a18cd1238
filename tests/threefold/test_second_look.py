"""A second look: what is not right is read again behind a network, and said; a disk of this machine is believed."""

from pathlib import Path

import pytest

from tests.support.flipped import FlippedStorage
from threefold.errors import CheckFailed
from threefold.storage import Storage, local, open_storage
from threefold.storage.contract import CutShort
from threefold.storage.fsspec import FsspecStorage
from threefold.storage.memory import MemoryStorage
from threefold.storage.object_store import ObjectStorage
from threefold.storage.repeating import RepeatingStorage
from threefold.storage.second_look import read_checked


def checked(storage: Storage) -> bytes:
    content = storage.read("key")
    if content != b"right":
        raise CheckFailed("memory://test/key is damaged")
    return content


def test_a_spoiled_answer_is_asked_for_again_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    inner = MemoryStorage()
    inner.write("key", b"right")
    for cuts in (False, True):
        storage = FlippedStorage(RepeatingStorage(inner), 0, cuts=cuts)
        assert read_checked(storage, "memory://test/key", checked) == b"right"
        assert len(storage.reads) == 2
    assert capsys.readouterr().err.count("memory://test/key differed once, then was right") == 2


def test_what_is_stored_wrong_is_damage(capsys: pytest.CaptureFixture[str]) -> None:
    inner = MemoryStorage()
    inner.write("key", b"wrong")
    storage = FlippedStorage(inner)
    with pytest.raises(CheckFailed):
        read_checked(storage, "memory://test/key", checked)
    assert len(storage.reads) == 2
    assert not capsys.readouterr().err


@pytest.mark.parametrize("is_server", [True, False])
def test_a_folder_is_read_again_past_the_cache_if_a_server_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_server: bool
) -> None:
    monkeypatch.setattr(local, "is_remote", lambda folder: is_server)
    inner = open_storage(tmp_path)
    inner.write("key", b"right")
    storage = FlippedStorage(inner, 0)
    if is_server:
        assert read_checked(storage, "key", checked) == b"right"
        again = inner.afresh()
        assert again is not None
        assert again.read_ranges("key", [(1, 3)]) == [b"ig"]
        with pytest.raises(CutShort):
            again.read_ranges("key", [(1, 9)])
    else:
        with pytest.raises(CheckFailed):
            read_checked(storage, "key", checked)


def test_a_second_look_has_a_connection_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    for storage in (ObjectStorage("s3://bucket/run"), RepeatingStorage(ObjectStorage("s3://bucket/run"))):
        again = storage.afresh()
        assert again is not None
        assert type(again) is type(storage)
        assert again.url == storage.url
        first, second = (getattr(each, "_storage", each)._store for each in (storage, again))
        assert first is not second
    files = FsspecStorage("memory://bucket/second-look")
    files.write("key", b"x")
    assert files.afresh()._fs is not files._fs
    assert files.afresh().read("key") == b"x"
