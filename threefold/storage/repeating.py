"""RepeatingStorage: a storage whose requests are repeated where the server did not answer, each after a longer pause.

That comes on top of what a client library repeats by itself: some give up on an answer that breaks off in its body.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from threefold.backoff import Backoff
from threefold.storage import Buffer, ObjectInfo, Storage, TemporaryFailure, open_storage

T = TypeVar("T")
MAX_ATTEMPTS, FIRST_PAUSE_S = 5, 0.2


def open_repeating(url: str | Path, *, write_memory_bytes: int | None = None) -> Storage:
    """The storage behind a path or URL (see `open_storage`), its requests repeated where it is no local folder."""
    storage = open_storage(url, write_memory_bytes=write_memory_bytes)
    return storage if storage.local_path("any") else RepeatingStorage(storage)


def repeating(work: Callable[[], T]) -> T:
    """Return what a request returns, at the latest at its fifth attempt; then raise its TemporaryFailure."""
    backoff = Backoff(FIRST_PAUSE_S, max_tries=MAX_ATTEMPTS)
    while True:
        try:
            return work()
        except TemporaryFailure:
            if (pause_s := backoff.next_s()) is None:
                raise
        time.sleep(pause_s)


class RepeatingStorage:
    """Another storage with patience; a write of an iterable is tried once, since its buffers are gone then."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.url, self.address = storage.url, storage.address
        self.supports_if_absent = storage.supports_if_absent

    def write(
        self, key: str, data: Buffer | Iterable[Buffer], *, if_absent: bool = False, size_bytes: int | None = None
    ) -> None:
        if isinstance(data, bytes | bytearray | memoryview):
            repeating(lambda: self._storage.write(key, data, if_absent=if_absent, size_bytes=size_bytes))
        else:
            self._storage.write(key, data, if_absent=if_absent, size_bytes=size_bytes)

    def read(self, key: str) -> bytes:
        return repeating(lambda: self._storage.read(key))

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        return repeating(lambda: self._storage.read_ranges(key, ranges))

    def info(self, key: str) -> ObjectInfo | None:
        return repeating(lambda: self._storage.info(key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return iter(repeating(lambda: tuple(self._storage.list(prefix))))

    def list_keys(self, prefix: str = "") -> Iterator[str]:
        return iter(repeating(lambda: tuple(self._storage.list_keys(prefix))))

    def list_folders(self, prefix: str = "") -> Iterator[str]:
        return iter(repeating(lambda: tuple(self._storage.list_folders(prefix))))

    def delete(self, keys: Iterable[str]) -> None:
        listed = tuple(keys)
        repeating(lambda: self._storage.delete(listed))

    def copy(self, source: str, target: str) -> None:
        repeating(lambda: self._storage.copy(source, target))

    def local_path(self, key: str) -> Path | None:
        return self._storage.local_path(key)
