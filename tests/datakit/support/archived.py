"""What the tests of archives share: a store of several shards, archives of many small frames, faulty storage."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from datakit import TokenStore, write_store
from datakit.archives.archiving import archive
from threefold.errors import StorageError
from threefold.storage import Buffer, ObjectInfo, Storage, open_storage

FRAME_BYTES = 512


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""


def make_store(path: Path) -> TokenStore:
    """A store of three shards and a few frames each, with empty documents."""
    rng = np.random.default_rng(7)
    documents = [rng.integers(0, 300, size) for size in (0, 1, 700, 256, 0, 3000, 5)]
    return write_store(path, documents, vocab_size=300, shard_documents=3)


def make_archive(store: Path, place: str) -> None:
    """An archive of many small frames."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datakit.archives.archiving.FRAME_BYTES", FRAME_BYTES)
        archive(store, place)


class FaultyStorage:
    """A storage in which the calls of one method fail: after `skip` good ones the next `times`, with `fault`."""

    def __init__(
        self, url: str, method: str, *, skip: int = 0, times: int = 10**9, fault: type[BaseException] = StorageError
    ) -> None:
        self._storage: Storage = open_storage(url)
        self._method, self._skip, self._times, self._fault = method, skip, times, fault
        self.url, self.supports_if_absent = self._storage.url, self._storage.supports_if_absent
        self.num_faults = 0

    def write(
        self, key: str, data: Buffer | Iterable[Buffer], *, if_absent: bool = False, size_bytes: int | None = None
    ) -> None:
        self._count("write")
        self._storage.write(key, data, if_absent=if_absent, size_bytes=size_bytes)

    def read(self, key: str) -> bytes:
        self._count("read")
        return self._storage.read(key)

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        self._count("read_ranges")
        return self._storage.read_ranges(key, ranges)

    def info(self, key: str) -> ObjectInfo | None:
        return self._storage.info(key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self._storage.list(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        self._count("delete")
        self._storage.delete(keys)

    def local_path(self, key: str) -> Path | None:
        return self._storage.local_path(key)

    def _count(self, method: str) -> None:
        if method != self._method:
            return
        self._skip -= 1
        if self._skip < 0 and self.num_faults < self._times:
            self.num_faults += 1
            raise self._fault(f"no {method} for the test")
