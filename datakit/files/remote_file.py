"""RemoteFile: an object behind a URL as a seekable binary file; memory is four blocks of 4 MiB.

A read after a seek fetches what it asks for. One that goes on where the last ended reads ahead, three blocks at a time
side by side, so that a stream is bound by bandwidth, not by the latency of each request.
"""

import errno
import io
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from threefold.errors import StorageError
from threefold.storage import OBJECT_STORES, Storage
from threefold.storage.repeating import open_repeating
from threefold.storage.service import split_url

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

NUM_AHEAD = 3  # blocks
_MAX_STORAGES = 64  # each holds a client; an input may have any number of folders
_SETTINGS = ("AWS_", "AZURE_", "GOOGLE_", "THREEFOLD_")  # how names begin of what clients take from the environment


class RemoteFile(io.RawIOBase):
    """One object, opened for reading; give it to `io.BufferedReader`."""

    first_bytes, block_bytes = 256 << 10, 4 << 20  # that are asked for at once

    def __init__(self, url: str, *, stop: int | None = None, size_bytes: int | None = None) -> None:
        """Look the object up if its size is not known; StorageError if it is missing.

        Nothing at or after byte `stop` will be read.
        """
        self._storage, self._key = storage_of(url)
        if size_bytes is None:
            info = self._storage.info(self._key)
            if info is None:
                raise StorageError(f"{url} does not exist", hint="check the URL")
            size_bytes = info.size_bytes
        self._size_bytes = size_bytes if stop is None else min(stop, size_bytes)
        self._position = self._window_start = 0
        self._window = memoryview(b"")
        self._ahead: deque[tuple[int, Future[bytes]]] = deque()  # consecutive blocks, each with where it starts

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size_bytes}[whence]
        if position < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))  # as any other file does
        self._position = position
        return self._position

    def readinto(self, buffer: "WriteableBuffer") -> int:
        target = memoryview(buffer).cast("B")
        if not len(target) or self._position >= self._size_bytes:
            return 0
        if not 0 <= self._position - self._window_start < len(self._window):
            self._fill(len(target))
        found = self._window[self._position - self._window_start :][: len(target)]
        target[: len(found)] = found
        self._position += len(found)
        return len(found)

    def _fill(self, wanted_bytes: int) -> None:
        """Move the window to the position."""
        start, goes_on = self._position, self._position == self._window_start + len(self._window)
        if self._ahead and self._ahead[0][0] == start:
            data = self._ahead.popleft()[1].result()
        else:
            self._ahead.clear()
            data = self._fetch(start, min(start + max(wanted_bytes, self.first_bytes), self._size_bytes))
        self._window_start, self._window = start, memoryview(data)
        next_start = self._ahead[-1][0] + self.block_bytes if self._ahead else start + len(data)
        while goes_on and len(self._ahead) < NUM_AHEAD and next_start < self._size_bytes:
            stop = min(next_start + self.block_bytes, self._size_bytes)
            self._ahead.append((next_start, _threads().submit(self._fetch, next_start, stop)))
            next_start = stop

    def _fetch(self, start: int, stop: int) -> bytes:
        ranges = [(begin, min(begin + self.block_bytes, stop)) for begin in range(start, stop, self.block_bytes)]
        return b"".join(self._storage.read_ranges(self._key, ranges))


def is_url(path: str) -> bool:
    """Return whether a path names an object behind a URL, not a local file."""
    return "://" in path


def storage_of(url: str) -> tuple[Storage, str]:
    """Return the storage that holds an object, and its key there.

    Connections are shared by all that is in a bucket; of other URLs by what is in a folder. Where the environment has
    come to name another server or other keys, that is another storage.
    """
    settings = tuple((name, os.environ[name]) for name in os.environ if name.startswith(_SETTINGS))
    scheme = url.partition("://")[0]
    if scheme in OBJECT_STORES:
        bucket, key = split_url(url)
        return _storage(f"{scheme}://{bucket}", settings), key
    folder, _, name = url.rpartition("/")
    return _storage(folder, settings), name


@lru_cache(_MAX_STORAGES)
def _storage(url: str, settings: tuple[tuple[str, str], ...]) -> Storage:
    del settings
    return open_repeating(url)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(NUM_AHEAD, thread_name_prefix="read-ahead")
