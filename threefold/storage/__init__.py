"""The narrow synchronous seam over keys that checkpoints and token stores are written through.

Keys are relative, with "/" between parts. Every method blocks; concurrency belongs to the callers. Failures are
StorageErrors that say what was done, where and what to try; those that another try may mend are TemporaryFailures.
`open_storage` chooses the backend by the URL.
"""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from threefold.debug import is_debugging
from threefold.errors import UserError, quoted
from threefold.storage.contract import (
    OBJECT_STORES,
    AlreadyExists,
    Buffer,
    ObjectInfo,
    Storage,
    TemporaryFailure,
    buffers_of,
    check_key,
    is_temporary,
    temporary_name,
    written_name,
)
from threefold.storage.folders import is_local, local_root
from threefold.storage.mistyped import refuse_mistyped

__all__ = [
    "OBJECT_STORES",
    "AlreadyExists",
    "Buffer",
    "ObjectInfo",
    "Storage",
    "TemporaryFailure",
    "buffers_of",
    "check_key",
    "is_local",
    "is_same_place",
    "is_temporary",
    "local_root",
    "open_storage",
    "temporary_name",
    "written_name",
]


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
    if text.startswith("hf:") and not text.startswith("hf://"):
        folder = text.removeprefix("hf:") or "FOLDER"
        raise UserError(
            f"{text!r} is a Hugging Face folder to what loads a model; here a folder or URL of a run or store is meant",
            hint=f"make a run of it: ckptkit import {quoted(folder)} RUN; on the Hub it is hf://OWNER/MODEL",
        )
    refuse_mistyped(text)
    if text == "~" or text.startswith("~/"):
        raise UserError(
            f"only a shell knows {text!r}, here it is a folder named ~", hint=quoted(Path(text).expanduser())
        )
    if scheme in ("", "file"):
        from threefold.storage.local import LocalStorage

        return LocalStorage(_folder_of(text) if scheme else text)
    if scheme in OBJECT_STORES:
        from threefold.packages import needed_for

        with needed_for(text):
            from threefold.storage.object_store import ObjectStorage
        return ObjectStorage(text, write_memory_bytes=write_memory_bytes)
    from threefold.storage.fsspec import FsspecStorage

    return FsspecStorage(text)


def _folder_of(url: str) -> str:
    """Return the folder of a file:// URL, which has no query and no fragment: a "?" or "#" is of the name."""
    host, slash, path = url.partition("://")[2].partition("/")
    if host not in ("", "localhost") or not slash:
        meant = Path(host, path).absolute()
        raise UserError(
            f"{url!r} names the host {host!r}, a file URL has three slashes", hint=quoted(f"file://{meant}")
        )
    return unquote(f"/{path}")


def is_same_place(one: Storage, other: Storage) -> bool:
    """Return whether two storages hold the same objects, as far as URLs and this machine's links and mounts say."""
    return _place_of(one) == _place_of(other)


def _place_of(storage: Storage) -> object:
    """Return the URL, or of a folder the file behind the part of its path that is there, and the rest of it."""
    root = local_root(storage)
    if root is None:
        return storage.url
    folder = root.resolve()
    nearest = next(place for place in (folder, *folder.parents) if place.exists())
    status = nearest.stat()
    return status.st_dev, status.st_ino, folder.relative_to(nearest)
