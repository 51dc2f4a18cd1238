"""RepeatingStorage: requests that the server did not answer are repeated, faults that stay are raised at once."""

from collections.abc import Iterator

import pytest

from threefold.errors import StorageError
from threefold.storage import TemporaryFailure
from threefold.storage.fault import Fault, FaultStorage
from threefold.storage.memory import MemoryStorage
from threefold.storage.repeating import RepeatingStorage, open_repeating
from threefold.storage.wrapping import OPERATIONS

pytestmark = pytest.mark.usefixtures("short_pauses")


def test_every_request_is_repeated() -> None:
    faults = [Fault(TemporaryFailure("not now"), (each,), times=4) for each in OPERATIONS]
    storage = RepeatingStorage(FaultStorage(MemoryStorage(), *faults))
    storage.write("a/x", b"one")
    storage.write("b", bytearray(b"two"))
    assert storage.read("a/x") == b"one"
    assert storage.read_ranges("b", [(1, 2), (0, 1)]) == [b"w", b"t"]
    assert [found.key for found in storage.list()] == ["a/x", "b"]
    assert sorted(storage.list_keys()) == ["a/x", "b"]
    assert list(storage.list_folders()) == ["a"]
    storage.copy("b", "c")
    storage.delete(key for key in ("b", "nothing"))
    assert storage.info("b") is None
    info = storage.info("c")
    assert info is not None
    assert info.size_bytes == 3
    assert [fault.num_met for fault in faults] == [4] * len(OPERATIONS)


def test_a_request_that_fails_for_good_is_raised() -> None:
    fault = Fault(TemporaryFailure("not now"))
    with pytest.raises(TemporaryFailure, match="not now"):
        RepeatingStorage(FaultStorage(MemoryStorage(), fault)).read("a")
    assert fault.num_met == 5


@pytest.mark.parametrize(("operation", "num_tries"), [("read", 1), ("info", 1), ("list", 5), ("delete", 5)])
def test_after_the_time_of_three_requests_a_read_is_not_begun_again(
    monkeypatch: pytest.MonkeyPatch, operation: str, num_tries: int
) -> None:
    monkeypatch.setenv("THREEFOLD_STORAGE_TIMEOUT_S", "0.001")  # three of them are shorter than a pause
    fault = Fault(TemporaryFailure("not now"))
    storage = RepeatingStorage(FaultStorage(MemoryStorage(), fault))
    with pytest.raises(TemporaryFailure, match="not now"):
        getattr(storage, operation)("a")
    assert fault.num_met == num_tries


def test_other_faults_and_writes_that_cannot_be_repeated_are_tried_once() -> None:
    lasting, passing = Fault(StorageError("not now"), ("read",)), Fault(TemporaryFailure("not now"), ("write",))
    storage = RepeatingStorage(FaultStorage(MemoryStorage(), lasting, passing))
    with pytest.raises(StorageError, match="not now"):
        storage.read("a")

    def buffers() -> Iterator[bytes]:
        yield b"gone after the first try"

    with pytest.raises(TemporaryFailure):
        storage.write("a", buffers())
    assert (lasting.num_met, passing.num_met) == (1, 1)


def test_a_local_folder_needs_no_patience(tmp_path: object) -> None:
    assert not isinstance(open_repeating(str(tmp_path)), RepeatingStorage)
    assert isinstance(open_repeating("memory://x"), RepeatingStorage)
