"""PartSink: one data file written as a stream of buffers, on any storage, with the checksum of each granule."""

import queue
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ckptkit.io.blocks import GRANULE_BYTES, BlockWriter, Columns, checksums
from threefold.errors import UserError
from threefold.storage import Storage
from threefold.storage.folders import local_root
from threefold.storage.local import local_failure
from threefold.storage.new_file import NewFile

Bytes = npt.NDArray[np.uint8]
UPLOAD_BUFFER_BYTES = 4 * GRANULE_BYTES


class PartSink(Protocol):
    """Takes a file's bytes in order, in buffers of whole granules, the last one excepted."""

    def write(self, data: Bytes) -> Columns:
        """Take the next bytes, which may change after the call; give the checksums of their granules."""

    def close(self) -> None:
        """Make the file durable; it must be complete."""

    def abort(self) -> None:
        """Stop, and leave nothing of the file."""


def open_sink(storage: Storage, key: str, size_bytes: int) -> PartSink:
    """The sink of one file of known size; nothing is written yet."""
    root = local_root(storage)
    return RemoteSink(storage, key, size_bytes) if root is None else LocalSink(root, key, size_bytes)


class LocalSink:
    """Blocks written straight to a local file, which has its name once it is closed."""

    def __init__(self, root: Path, key: str, size_bytes: int) -> None:
        self._path = root / key
        self._at = 0
        try:
            self._writer = BlockWriter(NewFile(root, key), size_bytes)
        except OSError as error:
            raise local_failure(error, "write", self._path) from error

    def write(self, data: Bytes) -> Columns:
        try:
            found = self._writer.write(self._at, [(data.ctypes.data, len(data))])
        except OSError as error:
            raise local_failure(error, "write", self._path) from error
        self._at += len(data)
        return found

    def close(self) -> None:
        try:
            self._writer.close()
        except OSError as error:
            raise local_failure(error, "write", self._path) from error

    def abort(self) -> None:
        self._writer.abort()


class RemoteSink:
    """An upload on a thread of its own, fed through a queue of one buffer."""

    def __init__(self, storage: Storage, key: str, size_bytes: int) -> None:
        self._buffers: queue.Queue[bytes | None] = queue.Queue(maxsize=1)
        self._failure: BaseException | None = None
        self._aborted = False
        upload = partial(self._upload, storage, key, size_bytes)
        self._thread = threading.Thread(target=upload, name=f"upload {key}", daemon=True)
        self._thread.start()

    def write(self, data: Bytes) -> Columns:
        for start in range(0, len(data), UPLOAD_BUFFER_BYTES):
            self._put(data[start : start + UPLOAD_BUFFER_BYTES].tobytes())
        return checksums(data)

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

    def _put(self, buffer: bytes | None) -> None:
        while self._failure is None:
            try:
                self._buffers.put(buffer, timeout=0.1)
            except queue.Full:
                continue
            return
        raise self._failure

    def _upload(self, storage: Storage, key: str, size_bytes: int) -> None:
        try:
            storage.write(key, self._take(), size_bytes=size_bytes)
        except BaseException as failure:  # handed to the caller's thread, whatever it is
            self._failure = failure

    def _take(self) -> Iterator[bytes]:
        while (buffer := self._buffers.get()) is not None:
            yield buffer
        if self._aborted:
            raise UserError("the upload was aborted")
