"""The trials of a storage find what breaks a promise: each fault is planted in a storage that keeps all others."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import pytest

from threefold.errors import CheckFailed
from threefold.storage import AlreadyExists, Buffer, ObjectInfo, Storage, buffers_of, trials
from threefold.storage.memory import MemoryStorage

Data = Buffer | Iterable[Buffer]


class ListsLate(MemoryStorage):
    """A write is listed once the next one has returned."""

    newest = ""

    def write(self, key: str, data: Data, *, if_absent: bool = False, size_bytes: int | None = None) -> None:
        super().write(key, data, if_absent=if_absent)
        self.newest = key

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return (item for item in super().list(prefix) if item.key != self.newest)


class ListsWhatIsGone(MemoryStorage):
    """What was deleted is still listed."""

    def __init__(self) -> None:
        super().__init__()
        self.gone: list[ObjectInfo] = []

    def delete(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        self.gone += [item for item in map(self.info, keys) if item]
        super().delete(keys)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return iter([*super().list(prefix), *(item for item in self.gone if item.key.startswith(prefix))])


class ReadsOld(MemoryStorage):
    """A cache keeps the first value of a key."""

    def __init__(self) -> None:
        super().__init__()
        self.cached: dict[str, bytes] = {}

    def read(self, key: str) -> bytes:
        return self.cached.setdefault(key, super().read(key))


class WritesInPlace(MemoryStorage):
    """What is written can be read before the write is over."""

    def write(self, key: str, data: Data, *, if_absent: bool = False, size_bytes: int | None = None) -> None:
        content = b""
        for buffer in buffers_of(data):
            content += buffer
            super().write(key, content)


class Mixes(MemoryStorage):
    """A read returns the end of the value before."""

    before = b""

    def write(self, key: str, data: Data, *, if_absent: bool = False, size_bytes: int | None = None) -> None:
        content = b"".join(buffers_of(data))
        super().write(key, self.before[:1] + content[1:], if_absent=if_absent)
        self.before = content


class IgnoresTheCondition(MemoryStorage):
    """A server that does not know If-None-Match writes all the same."""

    def write(self, key: str, data: Data, *, if_absent: bool = False, size_bytes: int | None = None) -> None:
        super().write(key, data)


class RefusesRepeats(MemoryStorage):
    """A write whose answer was lost cannot be repeated."""

    def write(self, key: str, data: Data, *, if_absent: bool = False, size_bytes: int | None = None) -> None:
        if if_absent and self.info(key):
            raise AlreadyExists(f"{key} exists already: another writer won")
        super().write(key, data)


class OfAnotherTime(MemoryStorage):
    """Its clock is an hour behind."""

    def info(self, key: str) -> ObjectInfo | None:
        item = super().info(key)
        return item and replace(item, modified_s=item.modified_s - 3600)


FAULTS: list[tuple[type[MemoryStorage], Callable[[Storage], str], str]] = [
    (ListsLate, trials.shows_each_write, "a listing of 1 objects lacks key"),
    (ListsLate, trials.lists_what_is_there, "a listing of 1 objects lacks folder-0/object-0000"),
    (ListsWhatIsGone, trials.lists_what_is_there, "a listing of 19 objects holds folder-0/object-0000"),
    (ReadsOld, trials.shows_each_write, "a read after a write returned something else"),
    (ReadsOld, trials.shows_no_part_of_a_write, "what was there is read after it was replaced"),
    (WritesInPlace, trials.shows_no_part_of_a_write, "a write that was under way could be seen"),
    (Mixes, trials.shows_one_value_or_the_other, "a mixture of two values"),
    (IgnoresTheCondition, trials.writes_once, "a write if absent replaced root"),
    (RefusesRepeats, trials.writes_once, "root exists already"),
    (OfAnotherTime, trials.keeps_time, "3600 s apart"),
]


@pytest.mark.parametrize(("kind", "trial", "what"), FAULTS)
def test_a_broken_promise_is_found(kind: type[MemoryStorage], trial: Callable[[Storage], str], what: str) -> None:
    with pytest.raises((CheckFailed, AlreadyExists), match=what):
        trial(kind())


@pytest.mark.parametrize("trial", dict.fromkeys(trial for _, trial, _ in FAULTS))
def test_a_storage_that_keeps_its_promises_passes(trial: Callable[[Storage], str]) -> None:
    assert trial(MemoryStorage())


@pytest.mark.parametrize(("won", "stored"), [((), b"a"), ((b"a", b"b"), b"b"), ((b"a",), b"b")])
def test_of_several_writers_one_wins(won: tuple[bytes, ...], stored: bytes) -> None:
    storage = MemoryStorage()
    storage.write("root", stored)
    with pytest.raises(CheckFailed, match="acknowledged"):
        trials.shows_the_winner(storage, "root", won)
    trials.shows_the_winner(storage, "root", [stored])
