"""MemoryStorage: objects in the memory of one process, for tests and simulations; nothing outlives it.

The storage behind `memory://` URLs is fsspec's, which processes of tests share by name. This one keeps all promises of
a Storage, exclusive writes too, and has no name to open it by.
"""

import hashlib
import threading
import time
from collections.abc import Iterable, Iterator, Sequence

from threefold.errors import StorageError
from threefold.storage.contract import AlreadyExists, Buffer, ObjectInfo, Storage, buffers_of, check_key


class MemoryStorage(Storage):
    """Keys of a dict; threads may share it."""

    supports_if_absent = True

    def __init__(self, url: str = "memory://test") -> None:
        self.url = self.address = url
        self._objects: dict[str, tuple[bytes, float]] = {}
        self._lock = threading.Lock()

    def write(
        self, key: str, data: Buffer | Iterable[Buffer], *, if_absent: bool = False, size_bytes: int | None = None
    ) -> None:
        content = b"".join(buffers_of(data))
        with self._lock:
            if if_absent and self._objects.get(check_key(key), (content,))[0] != content:
                raise AlreadyExists(f"{self.url}/{key} exists already: another writer won")
            self._objects[check_key(key)] = content, time.time()

    def read(self, key: str) -> bytes:
        with self._lock:
            if check_key(key) not in self._objects:
                raise StorageError(f"{self.url}/{key} does not exist")
            return self._objects[key][0]

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        content = self.read(key)
        for start, stop in ranges:
            if stop > len(content) and stop > start:
                raise StorageError(f"{self.url}/{key} ends at byte {len(content)}, wanted were {start} to {stop}")
        return [content[start:stop] for start, stop in ranges]

    def info(self, key: str) -> ObjectInfo | None:
        with self._lock:
            return self._info(key) if check_key(key) in self._objects else None

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        with self._lock:
            return iter([self._info(key) for key in sorted(self._objects) if key.startswith(prefix)])

    def list_keys(self, prefix: str = "") -> Iterator[str]:
        with self._lock:
            return iter([key for key in self._objects if key.startswith(prefix)])

    def list_folders(self, prefix: str = "") -> Iterator[str]:
        folder = f"{prefix.rstrip('/')}/" if prefix else ""
        below = (key.removeprefix(folder) for key in self.list_keys(folder))
        return iter(sorted({inner.partition("/")[0] for inner in below if "/" in inner}))

    def delete(self, keys: Iterable[str]) -> None:
        with self._lock:
            for key in keys:
                self._objects.pop(check_key(key), None)

    def copy(self, source: str, target: str) -> None:
        self.write(target, self.read(source))

    def afresh(self) -> "MemoryStorage":
        return self

    def _info(self, key: str) -> ObjectInfo:
        content, modified_s = self._objects[key]
        return ObjectInfo(key, len(content), modified_s, hashlib.md5(content, usedforsecurity=False).hexdigest())
