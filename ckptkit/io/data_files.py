"""Data files opened for verified reads and for writing, on a local disk or elsewhere: `open_reader`, `open_writer`.

Local files are written and read past the page cache; a load takes from it what it has. Others are read in ranges and
written as uploads. Failures are StorageErrors, and CheckFailed for bytes that do not have their checksum.
What a disk can hold still is looked up before anything is written.
"""

import ctypes
import os
import queue
import threading
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ckptkit.io.blocks import GRANULE_BYTES, BlockReader, BlockWriter, Bytes, Columns, SumPlaces, checksums, copy_many
from ckptkit.io.remote_reader import RemoteReader
from ckptkit.io.sums import ChunkSums
from ckptkit.model.chunk_table import cut
from threefold.closing import Making
from threefold.errors import StorageError, UserError
from threefold.storage import Buffer, Storage
from threefold.storage.file_systems import is_remote
from threefold.storage.folders import local_root
from threefold.storage.local import NO_ROOM, local_failures
from threefold.storage.new_file import NewFile
from threefold.storage.second_look import say_right

COPIED_BYTES, HELD_BYTES = 4 * GRANULE_BYTES, 8 * GRANULE_BYTES  # of an upload's buffers: copies, and the caller's own


class DataReader(Protocol):
    """One data file, open for reads that ascend."""

    @property
    def bytes_read(self) -> int:
        """The bytes read so far."""

    def read(self, ranges: npt.ArrayLike, *, num_threads: int = 2, sums: SumPlaces | None = None) -> None:
        """Fill memory from ranges (rows of file offset, bytes, target address) that are sorted by offset.

        What is read is added to `sums` in the same pass, if there are any.
        DamagedGranule is raised before anything of a damaged granule is handed out.
        """

    def close(self) -> None:
        """Close the file."""


class DataWriter(Making):
    """One new data file, written in order; use it in a `with`, which removes the file if it ends by an exception."""

    def write(self, rows: npt.ArrayLike, *, num_threads: int = 2) -> Columns:
        """Write the next bytes, rows of (address, bytes), and return the checksums of their granules.

        They are whole granules, but for the file's last bytes.
        """
        raise NotImplementedError


def open_reader(
    storage: Storage, key: str, size_bytes: int, expected: Columns | None, *, from_cache: bool = False
) -> DataReader:
    """Open a data file of a recorded size for reads that are verified, or are not if `expected` is None.

    `expected` are the recorded checksums of its granules. With `from_cache` what the page cache has of a local file is
    taken from there. Raise StorageError if a local file has another size.
    """
    path = storage.local_path(key)
    if path is None:
        return RemoteReader(storage, key, size_bytes, expected)
    with local_failures("read", path):
        return _LocalReader(path, size_bytes, expected, from_cache=from_cache, again=is_remote(path.parent))


def open_writer(
    storage: Storage, key: str, size_bytes: int, *, is_reused: bool = True, sums: ChunkSums | None = None
) -> DataWriter:
    """Open a new data file of known size for writing; what is written is added to `sums`, if there are any.

    Without `is_reused` the memory that is written stays as it is until the file is closed, and no upload copies it.
    """
    root = local_root(storage)
    if root is None:
        return _RemoteWriter(storage, key, size_bytes, is_reused, sums)
    return _LocalWriter(root, key, size_bytes, sums)


def write_blocks(
    storage: Storage, key: str, size_bytes: int, blocks: Iterable[Columns], *, is_reused: bool, num_threads: int = 2,
    sums: ChunkSums | None = None,
) -> Columns:  # fmt: skip
    """Write a data file from blocks, rows of (address, bytes), and return the checksums of its granules.

    `is_reused` says that a block's memory gets other bytes once the next block is taken. What is written is added to
    `sums`, if there are any.
    """
    with open_writer(storage, key, size_bytes, is_reused=is_reused, sums=sums) as writer:
        return np.concatenate([writer.write(rows, num_threads=num_threads) for rows in blocks])


class _LocalReader(BlockReader):
    """A local file, whose failures are StorageErrors; one of a server is read once more where it is not right."""

    def read(self, ranges: npt.ArrayLike, *, num_threads: int = 2, sums: SumPlaces | None = None) -> None:
        before = self.num_differed
        with local_failures("read", self.path):
            super().read(ranges, num_threads=num_threads, sums=sums)
        if self.num_differed > before:
            say_right(str(self.path))


class _LocalWriter(DataWriter):
    """Blocks written straight to a local file, which has its name once it is closed."""

    def __init__(self, root: Path, key: str, size_bytes: int, sums: ChunkSums | None) -> None:
        self._path, self._at, self._sums = root / key, 0, sums
        with local_failures("write", self._path):
            self._writer = BlockWriter(NewFile(root, key), size_bytes)
        if sums is not None:
            self._writer.sum_into(sums.address)

    def write(self, rows: npt.ArrayLike, *, num_threads: int = 2) -> Columns:
        segments = np.asarray(rows, np.uint64)
        with local_failures("write", self._path):
            found = self._writer.write(self._at, segments, num_threads=num_threads)
        self._at += int(segments[:, 1].sum())
        return found

    def close(self) -> None:
        with local_failures("write", self._path):
            self._writer.close()

    def abort(self) -> None:
        with local_failures("write", self._path):
            self._writer.abort()


class _RemoteWriter(DataWriter):
    """An upload on a thread of its own, fed by the caller's through a queue of one buffer."""

    def __init__(
        self, storage: Storage, key: str, size_bytes: int, is_reused: bool, sums: ChunkSums | None
    ) -> None:  # fmt: skip
        self._is_reused, self._at, self._sums = is_reused, 0, sums
        self._buffers: queue.Queue[Buffer | None] = queue.Queue(maxsize=1)
        self._failure: BaseException | None = None
        self._aborted = False
        upload = partial(self._upload, storage, key, size_bytes)
        self._thread = threading.Thread(target=upload, name=f"upload {key}", daemon=True)
        self._thread.start()

    def write(self, rows: npt.ArrayLike, *, num_threads: int = 2) -> Columns:
        digests = []
        most = COPIED_BYTES if self._is_reused else HELD_BYTES
        for buffer in _gathered(np.asarray(rows, np.uint64), most):
            digests.append(checksums(buffer))
            if self._sums is not None:
                self._sums.add(buffer, self._at)
            self._at += len(buffer)
            self._put(buffer.tobytes() if self._is_reused else buffer.data)
        return np.concatenate(digests)

    def close(self) -> None:
        self._put(None)
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def abort(self) -> None:
        self._aborted = True
        while self._thread.is_alive():
            try:
                self._buffers.put(None, timeout=0.1)
            except queue.Full:
                continue
            self._thread.join(timeout=1)

    def _put(self, buffer: Buffer | None) -> None:
        while self._failure is None:
            try:
                self._buffers.put(buffer, timeout=0.1)
            except queue.Full:
                continue
            return
        raise self._failure

    def _upload(self, storage: Storage, key: str, size_bytes: int) -> None:
        try:
            storage.write(key, self._taken(), size_bytes=size_bytes)
        except BaseException as failure:  # raised in the caller's thread, whatever it is
            self._failure = failure

    def _taken(self) -> Iterator[Buffer]:
        while (buffer := self._buffers.get()) is not None:
            yield buffer
        if self._aborted:
            raise UserError("the upload was aborted")


def _gathered(rows: Columns, most: int) -> Iterator[Bytes]:
    """Yield the bytes of rows in buffers of `most` bytes; one row's are not copied."""
    if len(rows) == 1:
        address, size_bytes = rows[0].tolist()
        whole = np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))
        yield from (whole[start : start + most] for start in range(0, size_bytes, most))
        return
    source, offset, block, at, size = cut(rows[:, 1].astype(np.int64), most)
    for number in range(int(block[-1]) + 1):
        part = block == number
        gathered = np.empty(int(size[part].sum()), np.uint8)
        address = rows[source[part], 0].astype(np.int64) + offset[part]
        copy_many(np.stack([address, gathered.ctypes.data + at[part], size[part]], axis=1))
        yield gathered


def free_bytes(storage: Storage) -> int | None:
    """Return how many bytes the disk of a local folder can still take; None of other storages, which are not asked."""
    if (place := _place(storage)) is None:
        return None
    with local_failures("look up", place):
        status = os.statvfs(place)
    return status.f_bavail * status.f_frsize


def refuse_full(storage: Storage, num_bytes: int) -> None:
    """Raise StorageError if a local folder's disk has less room than so many bytes; other storages are not asked."""
    free = free_bytes(storage)
    if free is not None and free < num_bytes:
        raise StorageError(
            f"{storage.url} needs {num_bytes:,} bytes, its disk has {free:,} left",
            hint=f"free some space or choose another place; df -h {quote(str(_place(storage)))}",
        )


def is_out_of_room(error: BaseException | None) -> bool:
    """Return whether a failure, or what it was raised from, is that a disk or a quota is full."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            return True
        error = error.__cause__
    return False


def _place(storage: Storage) -> Path | None:
    """Return the nearest folder that is there, of a local storage."""
    root = local_root(storage)
    return None if root is None else next(each for each in (root, *root.parents) if each.exists())
