"""RepeatingStorage: requests that the server did not answer are repeated, faults that stay are told at once."""

import uuid
from collections.abc import Iterator

import pytest

from threefold.errors import StorageError
from threefold.storage import TemporaryFailure, open_storage, repeating
from threefold.storage.repeating import RepeatingStorage, open_repeating


class Failing:
    """A storage in memory each of whose requests fails some times before it is served."""

    def __init__(self, error: type[StorageError], times: int) -> None:
        self._storage = open_storage(f"memory://{uuid.uuid4().hex}")
        self._error, self._times, self.num_calls = error, times, 0

    def __getattr__(self, name: str) -> object:
        found = getattr(self._storage, name)
        if not callable(found):
            return found

        def call(*arguments: object, **options: object) -> object:
            self.num_calls += 1
            if self.num_calls % (self._times + 1):
                raise self._error("not now")
            return found(*arguments, **options)

        return call


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeating, "FIRST_PAUSE_S", 0.001)


def test_every_request_is_repeated() -> None:
    failing = Failing(TemporaryFailure, times=4)
    storage = RepeatingStorage(failing)  # type: ignore[arg-type]  # it has the methods, by __getattr__
    storage.write("a/x", b"one")
    storage.write("b", bytearray(b"two"))
    assert storage.read("a/x") == b"one"
    assert storage.read_ranges("b", [(1, 2), (0, 1)]) == [b"w", b"t"]
    assert [found.key for found in storage.list()] == ["a/x", "b"]
    assert list(storage.list_folders()) == ["a"]
    storage.copy("b", "c")
    storage.delete(key for key in ("b", "nothing"))
    assert storage.info("b") is None
    info = storage.info("c")
    assert info is not None
    assert info.size_bytes == 3
    assert failing.num_calls == 10 * 5


def test_a_request_that_fails_for_good_is_told() -> None:
    failing = Failing(TemporaryFailure, times=5)
    with pytest.raises(TemporaryFailure, match="not now"):
        RepeatingStorage(failing).read("a")  # type: ignore[arg-type]
    assert failing.num_calls == 5


def test_other_faults_and_writes_that_cannot_be_repeated_are_tried_once() -> None:
    lasting = Failing(StorageError, times=1)
    with pytest.raises(StorageError, match="not now"):
        RepeatingStorage(lasting).read("a")  # type: ignore[arg-type]
    failing = Failing(TemporaryFailure, times=1)

    def buffers() -> Iterator[bytes]:
        yield b"gone after the first try"

    with pytest.raises(TemporaryFailure):
        RepeatingStorage(failing).write("a", buffers())  # type: ignore[arg-type]
    assert (lasting.num_calls, failing.num_calls) == (1, 1)


def test_a_local_folder_needs_no_patience(tmp_path: object) -> None:
    assert not isinstance(open_repeating(str(tmp_path)), RepeatingStorage)
    assert isinstance(open_repeating("memory://x"), RepeatingStorage)
