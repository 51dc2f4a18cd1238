"""The narrow synchronous seam over keys that checkpoints and token stores are written through.

Keys are relative, with "/" between parts. Every method blocks; concurrency belongs to the callers.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from threefold.errors import StorageError

Buffer = bytes | bytearray | memoryview


class AlreadyExists(StorageError):
    """An if-absent write found the key taken: another writer won."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One stored object; `modified_s` is seconds since the epoch."""

    key: str
    size_bytes: int
    modified_s: float


class Storage(Protocol):
    """Keys under one base URL; `supports_if_absent` is False where a backend cannot commit once and only once."""

    url: str
    supports_if_absent: bool

    def write(self, key: str, data: Buffer | Iterable[Buffer], *, if_absent: bool = False) -> None:
        """Write one object durably and atomically: after return it is whole, before that it is not listed."""

    def read(self, key: str) -> bytes:
        """Read one object whole; StorageError if it is missing."""

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read several [start, stop) byte ranges of one object."""

    def info(self, key: str) -> ObjectInfo | None:
        """Size and time of one object, None if it is missing."""

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All objects whose key starts with prefix, sorted by key."""

    def list_folders(self, prefix: str = "") -> Iterator[str]:
        """Names of the immediate children of folder `prefix` that hold objects, sorted, without descending."""

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; a missing one is no error."""

    def copy(self, source: str, target: str) -> None:
        """Copy one object within this storage."""

    def local_path(self, key: str) -> Path | None:
        """The file behind a key where there is one (C++ reads and writes it directly), else None."""
