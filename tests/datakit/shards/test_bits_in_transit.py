"""One answer of a server is spoiled, whichever it is: a store or archive is read and fetched as it is stored."""

from collections.abc import Callable
from pathlib import Path

import pytest

from datakit import Recipe, RemoteStore, TokenStore, archive, preprocess, unarchive, verify
from datakit.reports import verification
from datakit.shards import store_source
from tests.datakit.conftest import files_of, write_jsonl
from tests.support.flipped import FlippedStorage
from threefold.errors import CheckFailed
from threefold.storage.memory import MemoryStorage

URL = "memory://test"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, texts: list[str], tokenizer_path: str) -> Path:
    folder = tmp_path_factory.mktemp("stores")
    write_jsonl(folder / "a.jsonl", texts[:40])
    preprocess([str(folder / "a.jsonl")], folder / "a", Recipe(tokenizer_path))
    archive(folder / "a", str(folder / "packed"))
    return folder / "a"


@pytest.fixture(params=["a", "packed"])
def stored(request: pytest.FixtureRequest, store: Path) -> MemoryStorage:
    """The objects of the store, or of its archive."""
    storage = MemoryStorage(URL)
    for path in (store.parent / request.param).iterdir():
        storage.write(path.name, path.read_bytes())
    return storage


def tokens(store: Path, folder: Path) -> object:
    with_cache = RemoteStore.at(URL, cache=str(folder / "cache"))
    found = with_cache.tokens(0, with_cache.num_tokens).tolist()
    with_cache.origin(3)
    return found


def fetched(store: Path, folder: Path) -> object:
    unarchive(URL, folder / "here")
    return {name: data for name, data in files_of(folder / "here").items() if name in files_of(store)}


ACTS: dict[str, Callable[[Path, Path], object]] = {
    "tokens": tokens,
    "verify": lambda store, folder: verify(URL),
    "unarchive": fetched,
}


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
def test_a_spoiled_answer_is_fetched_again(
    stored: MemoryStorage, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], act: Callable[[Path, Path], object],
) -> None:  # fmt: skip
    def through(storage: FlippedStorage, name: str) -> object:
        monkeypatch.setattr(store_source, "open_repeating", lambda place: storage)
        (tmp_path / name).mkdir()
        return act(store, tmp_path / name)

    monkeypatch.setattr(verification, "_record_faults", lambda storage: ())
    clean = FlippedStorage(stored)
    expected = through(clean, "clean")
    data = [number for number, key in enumerate(clean.reads) if not key.endswith(".json")]
    assert len(data) > 2
    for cuts in (False, True):
        capsys.readouterr()
        for number in data:
            assert through(FlippedStorage(stored, number, cuts=cuts), f"{number}-{cuts}") == expected
        num_said = capsys.readouterr().err.count("differed once, then was right")
        assert num_said == len(data) if cuts else num_said  # some bits are without a meaning, in heads of frames


def test_what_is_stored_damaged_is_damage(
    stored: MemoryStorage, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_source, "open_repeating", lambda place: stored)
    key = next(key for key in stored.list_keys() if ".bin" in key)
    content = bytearray(stored.read(key))
    content[len(content) // 2] ^= 1
    stored.write(key, bytes(content))
    with pytest.raises(CheckFailed):
        tokens(store, tmp_path)
    with pytest.raises(CheckFailed):
        unarchive(URL, tmp_path / "here")
    assert TokenStore.open(store).num_tokens
