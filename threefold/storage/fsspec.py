"""Any URL that fsspec knows, through fsspec's own backend for it.

A write goes to a hidden temporary name, which is never listed, and is then moved to its key: a rename on file systems,
a copy within the server on object stores. An if-absent write does not exist here: one writer only may commit. A forked
process opens the file system again: threads and connections stay with its parent.
"""

import contextlib
import copy
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from threefold.errors import StorageError, UserError, quoted
from threefold.masking import masked, shown_cause
from threefold.packages import needed_for
from threefold.storage.contract import (
    AlreadyExists,
    Buffer,
    ObjectInfo,
    Storage,
    TemporaryFailure,
    buffers_of,
    bytes_of_ranges,
    check_key,
    is_temporary,
    temporary_name,
)
from threefold.storage.hub import SCHEME, download_command
from threefold.storage.local import NO_ROOM

TIME_FIELDS = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")
T = TypeVar("T")


class FsspecStorage(Storage):
    """Keys are paths below the URL's path on its fsspec file system."""

    supports_if_absent = False

    def __init__(self, url: str) -> None:
        with needed_for(url):
            from fsspec.core import url_to_fs
        self.address = url.rstrip("/")
        self.url = masked(self.address)
        if url.startswith("ftp://"):
            raise UserError(
                f"{self.url}: FTP cannot be read in ranges side by side, nor written to at once",
                hint=f"wget -r {quoted(self.url)}, then name the files; or use sftp:// or https://",
            )
        # Listings are never cached: other processes write to the same place.
        self._make = partial(url_to_fs, url, use_listings_cache=False)
        self._opened, root = self._open()
        self._process = os.getpid()
        self._root = root.rstrip("/")

    def _open(self) -> tuple[Any, str]:
        """Return the file system and the URL's path on it."""
        try:
            opened, root = self._make()
        except (ValueError, TypeError, ImportError) as error:
            raise UserError(
                f"cannot open {self.url}: {_one_line(error)}", hint="check the URL's scheme and its fsspec package"
            ) from shown_cause(error)
        except Exception as error:  # each fsspec backend raises the errors of a client library of its own
            raise StorageError(
                f"cannot open {self.url}: {_one_line(error)}", hint="check the address, and that a server answers there"
            ) from shown_cause(error)
        return opened, root

    @property
    def _fs(self) -> Any:
        if self._process != os.getpid():
            self._opened, self._process = self._open()[0], os.getpid()
        return self._opened

    def write(
        self, key: str, data: Buffer | Iterable[Buffer], *, if_absent: bool = False, size_bytes: int | None = None
    ) -> None:
        target = self._path(key)
        folder, _, name = target.rpartition("/")
        temporary = f"{folder}/{temporary_name(name)}"
        buffers = buffers_of(data)
        if if_absent and self.info(key) is not None:
            if self.read(key) == b"".join(buffers):
                return
            raise AlreadyExists(f"{self.url}/{key} exists already: another writer won")

        def write_and_move() -> None:
            try:
                with self._open_new(temporary, folder) as file:
                    for buffer in buffers:
                        file.write(buffer)
                self._move(temporary, target)
            except BaseException:
                with contextlib.suppress(OSError):
                    self._fs.rm_file(temporary)
                raise

        self._call("write", key, write_and_move)

    def read(self, key: str) -> bytes:
        return bytes(self._call("read", key, lambda: self._fs.cat_file(self._path(key))))

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        path = self._path(key)

        def get(starts: list[int], stops: list[int]) -> list[bytes]:
            return self._call(
                "read", key, lambda: self._fs.cat_ranges([path] * len(starts), starts, stops, on_error="raise")
            )

        return bytes_of_ranges(f"{self.url}/{key}", ranges, get)

    def info(self, key: str) -> ObjectInfo | None:
        path = self._path(key)

        def find() -> ObjectInfo | None:
            try:
                found = self._fs.info(path)
            except FileNotFoundError:
                return None
            return self._object(found) if found["type"] == "file" else None

        return self._call("look up", key, find)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        folder = prefix.rpartition("/")[0]

        def find() -> list[ObjectInfo]:
            try:
                found = self._fs.find(f"{self._root}/{folder}".rstrip("/"), detail=True)
            except FileNotFoundError:
                return []
            objects = [self._object(info) for info in found.values() if info["type"] != "directory"]
            return [o for o in objects if o.key.startswith(prefix) and not is_temporary(o.key.rpartition("/")[2])]

        return iter(sorted(self._call("list", folder, find), key=lambda item: item.key))

    def list_folders(self, prefix: str = "") -> Iterator[str]:
        folder = f"{self._root}/{prefix}".rstrip("/")

        def find() -> list[str]:
            try:
                found = self._fs.ls(folder, detail=True)
            except FileNotFoundError:
                return []
            return [info["name"].rstrip("/").rpartition("/")[2] for info in found if info["type"] == "directory"]

        return iter(sorted(self._call("list", prefix, find)))

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            path = self._path(key)

            def remove(path: str = path) -> None:
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(path)

            self._call("delete", key, remove)

    def clear(self) -> None:
        """Remove all that is there, with the folders, and what writes that broke off left under hidden names."""

        def remove() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm(self._root, recursive=True)

        self._call("delete", "", remove)

    def copy(self, source: str, target: str) -> None:
        self._call("copy", source, lambda: self._fs.cp_file(self._path(source), self._path(target)))

    def afresh(self) -> "FsspecStorage":
        again = copy.copy(self)
        again._make = partial(self._make, skip_instance_cache=True)
        again._opened, again._process = again._open()[0], os.getpid()
        return again

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    def _object(self, info: dict[str, Any]) -> ObjectInfo:
        time = next((info[field] for field in TIME_FIELDS if info.get(field)), 0.0)
        key = info["name"].removeprefix(self._root).lstrip("/")
        modified_s = time.timestamp() if isinstance(time, datetime) else _seconds(time)
        return ObjectInfo(key, info["size"] or 0, modified_s, str(info.get("ETag") or "").strip('"'))

    def _move(self, source: str, target: str) -> None:
        """Rename if the file system has its own way to; fsspec's general one takes names for patterns."""
        from fsspec import AbstractFileSystem

        if type(self._fs).mv is not AbstractFileSystem.mv:
            self._fs.mv(source, target)
            return
        self._fs.cp_file(source, target)
        self._fs.rm_file(source)

    def _open_new(self, path: str, folder: str) -> Any:
        """Open a file for writing; its folder is made only if the file system insists on one."""
        try:
            return self._fs.open(path, "wb")
        except FileNotFoundError:
            self._fs.makedirs(folder, exist_ok=True)
            return self._fs.open(path, "wb")

    def _call(self, doing: str, key: str, work: Callable[[], T]) -> T:
        try:
            return work()
        except (StorageError, AssertionError):
            raise
        except FileNotFoundError as error:
            raise StorageError(f"{self.url}/{key} does not exist") from shown_cause(error)
        except PermissionError as error:
            raise StorageError(f"cannot {doing} {self.url}/{key}: {error or 'no permission'}") from shown_cause(error)
        except Exception as error:  # each fsspec backend raises the errors of a client library of its own
            doing = f"cannot {doing} {self.url}/{key}"
            if isinstance(error, OSError) and error.errno in NO_ROOM:
                raise StorageError(
                    f"{doing}: {error.strerror}", hint="free some space or choose another place"
                ) from shown_cause(error)
            cause = str(error) or type(error).__name__
            raise TemporaryFailure(f"{doing}: {cause}", hint=_hint(f"{self.url}/{key}")) from shown_cause(error)


def _hint(url: str) -> str:
    """Return what to try if the server behind a URL does not answer."""
    if url.startswith(SCHEME):
        return f"where the Hub can be reached: {download_command(url)}"
    return "check the address, and that a server answers there"


def _seconds(time: object) -> float:
    try:
        return float(time)  # type: ignore[arg-type]  # text without a number is what the except is for
    except (TypeError, ValueError):
        return datetime.fromisoformat(str(time)).timestamp()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
