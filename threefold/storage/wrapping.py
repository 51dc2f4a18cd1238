"""WrappingStorage: another storage, each of whose requests passes through one method, which a subclass overrides.

Those here: `repeating` tries again, `request_log` reports, `fault` fails on purpose, `dry_run` changes nothing.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from threefold.storage.contract import Buffer, ObjectInfo, Storage

T = TypeVar("T")
OPERATIONS = ("write", "read", "read_ranges", "info", "list", "list_keys", "list_folders", "delete", "copy")


@dataclass(frozen=True, slots=True)
class Request:
    """One call of a storage: the method's name, its keys (of a listing the prefix), the bytes as far as known."""

    operation: str
    keys: tuple[str, ...]
    num_bytes: int | None = None


class WrappingStorage:
    """Another storage under the same URL; listings are whole before their first item is seen.

    As safe to share between threads as the storage within. One that `hides_files` names no local files.
    """

    hides_files = False

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.url, self.address = storage.url, storage.address
        self.supports_if_absent = storage.supports_if_absent

    def _request(self, request: Request, work: Callable[[], T]) -> T:
        """Return what `work` returns, which asks the storage within."""
        return work()

    def write(
        self, key: str, data: Buffer | Iterable[Buffer], *, if_absent: bool = False, size_bytes: int | None = None
    ) -> None:
        self._request(
            Request(
                "write",
                (key,),
                memoryview(data).nbytes if isinstance(data, bytes | bytearray | memoryview) else size_bytes,
            ),
            lambda: self._storage.write(key, data, if_absent=if_absent, size_bytes=size_bytes),
        )

    def read(self, key: str) -> bytes:
        return self._request(Request("read", (key,)), lambda: self._storage.read(key))

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        return self._request(
            Request("read_ranges", (key,), sum(stop - start for start, stop in ranges)),
            lambda: self._storage.read_ranges(key, ranges),
        )

    def info(self, key: str) -> ObjectInfo | None:
        return self._request(Request("info", (key,)), lambda: self._storage.info(key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return iter(self._request(Request("list", (prefix,)), lambda: tuple(self._storage.list(prefix))))

    def list_keys(self, prefix: str = "") -> Iterator[str]:
        return iter(self._request(Request("list_keys", (prefix,)), lambda: tuple(self._storage.list_keys(prefix))))

    def list_folders(self, prefix: str = "") -> Iterator[str]:
        return iter(
            self._request(Request("list_folders", (prefix,)), lambda: tuple(self._storage.list_folders(prefix)))
        )

    def delete(self, keys: Iterable[str]) -> None:
        listed = tuple(keys)
        self._request(Request("delete", listed), lambda: self._storage.delete(listed))

    def copy(self, source: str, target: str) -> None:
        self._request(Request("copy", (source, target)), lambda: self._storage.copy(source, target))

    def afresh(self) -> Storage | None:
        storage = self._storage.afresh()
        if storage is None:
            return None
        again = copy.copy(self)
        again._storage = storage
        return again

    def local_path(self, key: str) -> Path | None:
        return None if self.hides_files else self._storage.local_path(key)
