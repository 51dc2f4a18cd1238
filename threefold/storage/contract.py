"""The contract of a storage, and what all backends share; nothing here opens one.

`threefold.storage` has all names of this module. Its own files import them from here.
"""

import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from threefold.errors import StorageError

_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{16}\.tmp")
OBJECT_STORES = {  # URL schemes, and whose client serves them
    "s3": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "azure": "azure", "abfs": "azure", "abfss": "azure",
}  # fmt: skip
Buffer = bytes | bytearray | memoryview


class AlreadyExists(StorageError):
    """An if-absent write found the key taken by other bytes: another writer won."""


class TemporaryFailure(StorageError):
    """The server did not answer, broke its answer off or asked to come back: the same request may succeed later."""


class CutShort(StorageError):
    """Fewer bytes came than were asked for: the object is shorter, or the answer was."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One stored object; `modified_s` is seconds since the epoch, 0 if a backend does not say.

    `etag` changes with the content, as far as the backend knows; "" if it has none.
    """

    key: str
    size_bytes: int
    modified_s: float
    etag: str = ""


class Storage(Protocol):
    """Keys under one base URL; `supports_if_absent` is False if a backend cannot commit once and only once.

    A backend that derives from it has `list_keys` by `list`, and no local files, unless it says otherwise.

    `url` is what is shown and stored. `address` opens the same storage elsewhere: it may hold a password, so it is
    neither, nor part of a command line.
    """

    url: str
    address: str
    supports_if_absent: bool

    def write(
        self, key: str, data: Buffer | Iterable[Buffer], *, if_absent: bool = False, size_bytes: int | None = None
    ) -> None:
        """Write one object durably and atomically: after return it is whole, before that it is not listed.

        With if_absent, of all writers of different bytes exactly one returns, the others get AlreadyExists; writing
        the very bytes that are there succeeds, so that a write whose answer was lost may be repeated. Without
        supports_if_absent that holds for writers that come one after the other only. `size_bytes` is the size of an
        iterable's bytes, if it is known: object stores size the parts of an upload by it. Buffers are not copied:
        they must stay as they are until `write` returns, also those that an iterable gave before its last one.
        """

    def read(self, key: str) -> bytes:
        """Read one object whole; StorageError if it is missing."""

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        """Read several [start, stop) byte ranges of one object; StorageError if one goes past its end."""

    def info(self, key: str) -> ObjectInfo | None:
        """Size and time of one object, None if it is missing."""

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Return all objects whose key starts with prefix, sorted by key."""

    def list_keys(self, prefix: str = "") -> Iterator[str]:
        """Return the keys that start with prefix, in no order, where it can without a look at each object."""
        return (item.key for item in self.list(prefix))

    def list_folders(self, prefix: str = "") -> Iterator[str]:
        """Return names of the folders immediately in folder `prefix`, sorted, without descending.

        A folder whose objects were all deleted may still be named for a while.
        """

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; a missing one is not an error."""

    def copy(self, source: str, target: str) -> None:
        """Copy one object within this storage."""

    def afresh(self) -> "Storage | None":
        """Return the same storage on new connections and past caches; None if it is a disk of this machine."""

    def local_path(self, key: str) -> Path | None:
        """Return the file behind a key if there is one (C++ reads and writes it directly), else None."""
        return None


def check_key(key: str) -> str:
    """Return the key, if it is one: relative, normal, no empty, "." or ".." part."""
    assert not any(part in ("", ".", "..") for part in key.split("/")), f"{key!r} is not a storage key"
    return key


def buffers_of(data: Buffer | Iterable[Buffer]) -> Iterable[Buffer]:
    """Return the buffers to write one after the other: data itself, or its items."""
    return [data] if isinstance(data, bytes | bytearray | memoryview) else data


def bytes_of_ranges(
    place: str, ranges: Sequence[tuple[int, int]], get: Callable[[list[int], list[int]], Iterable[Buffer]]
) -> list[Buffer]:
    """Return the bytes of each range of an object; `get(starts, stops)` returns those of the ranges that have any.

    Raises StorageError, which names the `place`, if the object ends before one.
    """
    filled = [(start, stop) for start, stop in ranges if stop > start]
    contents = iter(get([start for start, _ in filled], [stop for _, stop in filled]) if filled else ())
    parts = [next(contents) if stop > start else b"" for start, stop in ranges]
    for (start, stop), part in zip(ranges, parts, strict=True):
        if len(part) != stop - start:
            raise CutShort(f"{place} ends at byte {start + len(part)}, wanted were {start} to {stop}")
    return parts


def temporary_name(name: str) -> str:
    """Return a hidden name, unique to this write, that `is_temporary` knows and no listing shows."""
    return f".{name}.{secrets.token_hex(8)}.tmp"


def written_name(temporary: str) -> str | None:
    """Return the name that a file under a `temporary_name` was to get, None for a name that was made otherwise."""
    match = _TEMPORARY.fullmatch(temporary)
    return match[1] if match else None


def is_temporary(name: str) -> bool:
    """Return whether a file name is hidden from listings as those of `temporary_name` are."""
    return name.startswith(".") and name.endswith(".tmp")
