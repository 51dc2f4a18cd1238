"""The narrow synchronous seam over keys that checkpoints and token stores are written through.

Keys are relative, with "/" between parts. Every method blocks; concurrency belongs to the callers. Failures are
StorageErrors that say what was done, where and what to try; those that another try may mend are TemporaryFailures.
`open_storage` chooses the backend by the URL.
"""

import os
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from threefold.debug import is_debugging
from threefold.errors import StorageError, UserError

# no "//" after the colon: taken for a folder, it would fill the local disk with what was meant for a server
_BROKEN_URL = re.compile(r"(s3|gs|gcs|az|azure|abfs|abfss|hf|http|https):(?!//)")
_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{16}\.tmp")
OBJECT_STORES = {  # URL schemes, and whose client serves them
    "s3": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "azure": "azure", "abfs": "azure", "abfss": "azure",
}  # fmt: skip
Buffer = bytes | bytearray | memoryview


class AlreadyExists(StorageError):
    """An if-absent write found the key taken by other bytes: another writer won."""


class TemporaryFailure(StorageError):
    """The server did not answer, broke its answer off or asked to come back: the same request may succeed later."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One stored object; `modified_s` is seconds since the epoch, 0 where a backend does not tell.

    `etag` changes with the content, as far as the backend knows; "" where it has none.
    """

    key: str
    size_bytes: int
    modified_s: float
    etag: str = ""


class Storage(Protocol):
    """Keys under one base URL; `supports_if_absent` is False where a backend cannot commit once and only once.

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
        supports_if_absent that holds for writers that come one after the other only. `size_bytes` tells the size of an
        iterable's bytes where it is known: object stores size the parts of an upload by it. Buffers are not copied:
        they must stay as they are until `write` returns, also those that an iterable gave before its last one.
        """

    def read(self, key: str) -> bytes:
        """Read one object whole; StorageError if it is missing."""

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        """Read several [start, stop) byte ranges of one object; StorageError where one goes past its end."""

    def info(self, key: str) -> ObjectInfo | None:
        """Size and time of one object, None if it is missing."""

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Return all objects whose key starts with prefix, sorted by key."""

    def list_keys(self, prefix: str = "") -> Iterator[str]:
        """The keys that start with prefix, in no order and without a look at each object, so cheaper than `list`."""

    def list_folders(self, prefix: str = "") -> Iterator[str]:
        """Return names of the folders immediately in folder `prefix`, sorted, without descending.

        A folder whose objects were all deleted may still be named for a while.
        """

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; a missing one is no error."""

    def copy(self, source: str, target: str) -> None:
        """Copy one object within this storage."""

    def local_path(self, key: str) -> Path | None:
        """Return the file behind a key where there is one (C++ reads and writes it directly), else None."""


def open_storage(url: str | Path, *, write_memory_bytes: int | None = None) -> Storage:
    """Return the storage behind a local path or file:// URL, S3, Google Cloud or Azure URL, or any that fsspec knows.

    Nothing is contacted yet. The client libraries are imported only for a URL that needs them. `write_memory_bytes`
    bounds what one write of several parts to an object store holds in memory, for a program that writes many at once.
    With THREEFOLD_DEBUG=1 each request is printed to stderr.
    """
    storage = _backend(url, write_memory_bytes)
    if is_debugging():
        from threefold.console import log
        from threefold.storage.request_log import LoggingStorage

        return LoggingStorage(storage, lambda answer: log(f"request: {answer}"))
    return storage


def _backend(url: str | Path, write_memory_bytes: int | None) -> Storage:
    if not isinstance(url, str | Path):
        raise UserError(f"a storage URL is a text or a Path, not {url!r}")
    text = str(url)
    scheme = urlsplit(text).scheme if "://" in text else ""
    if not text:
        raise UserError("an empty storage URL", hint="give a folder, or a URL such as s3://bucket/run")
    if typo := _BROKEN_URL.match(text):
        raise UserError(
            f"{text!r} is no URL, and a strange name for a folder", hint=f"{typo[1]}://{text[typo.end() :].lstrip('/')}"
        )
    if text == "~" or text.startswith("~/"):
        raise UserError(f"only a shell knows {text!r}, here it is a folder named ~", hint=str(Path(text).expanduser()))
    if scheme in ("", "file"):
        from threefold.storage.local import LocalStorage

        return LocalStorage(_folder_of(text) if scheme else text)
    if scheme in OBJECT_STORES:
        from threefold.storage.object_store import ObjectStorage

        return ObjectStorage(text, write_memory_bytes=write_memory_bytes)
    from threefold.storage.fsspec import FsspecStorage

    return FsspecStorage(text)


def _folder_of(url: str) -> str:
    """Return the folder of a file:// URL, which has no query and no fragment: a "?" or "#" is of the name."""
    host, slash, path = url.partition("://")[2].partition("/")
    if host not in ("", "localhost") or not slash:
        meant = Path(host, path).absolute()
        raise UserError(f"{url!r} names the host {host!r}, a file URL has three slashes", hint=f"file://{meant}")
    return unquote(f"/{path}")


def is_same_place(one: Storage, other: Storage) -> bool:
    """Return whether two storages hold the same objects, as far as URLs and this machine's links and mounts tell."""
    return _place_of(one) == _place_of(other)


def _place_of(storage: Storage) -> object:
    """Return the URL, or of a folder the file behind the part of its path that is there, and the rest of it."""
    path = storage.local_path("any")
    if path is None:
        return storage.url
    folder = Path(os.path.realpath(path)).parent
    there = next(each for each in (folder, *folder.parents) if os.path.exists(each))
    status = there.stat()
    return status.st_dev, status.st_ino, folder.relative_to(there)


def check_key(key: str) -> str:
    """Return the key, if it is one: relative, normal, no empty, "." or ".." part."""
    assert not any(part in ("", ".", "..") for part in key.split("/")), f"{key!r} is not a storage key"
    return key


def buffers_of(data: Buffer | Iterable[Buffer]) -> Iterable[Buffer]:
    """Return the buffers to write one after the other: data itself, or what it gives."""
    return [data] if isinstance(data, bytes | bytearray | memoryview) else data


def temporary_name(name: str) -> str:
    """Return a hidden name, unique to this write, that `is_temporary` tells and no listing shows."""
    return f".{name}.{secrets.token_hex(8)}.tmp"


def written_name(temporary: str) -> str | None:
    """Return the name that a file under a `temporary_name` was to get, None for a name that was made otherwise."""
    match = _TEMPORARY.fullmatch(temporary)
    return match[1] if match else None


def is_temporary(name: str) -> bool:
    """Return whether a file name is hidden from listings as those of `temporary_name` are."""
    return name.startswith(".") and name.endswith(".tmp")
