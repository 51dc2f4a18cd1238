"""ExactReader: the uncompressed bytes of a file, front to back, in pieces whose sizes something else has promised.

Whatever ends too early, goes on too long or cannot be unpacked is a CheckFailed that names the file. Memory is one
piece, and never more of it than the file really has.
"""

import gzip
import hashlib
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash
import zstandard

from datakit.files.durable import reading
from datakit.format.shard import Int64s
from threefold.errors import CheckFailed, UserError, listing

MAX_PIECE_BYTES = 1 << 30
COMPRESSIONS = ("", "gz", "zstd")
AGAIN = "copy or download it again"
BLOCK_BYTES = 1 << 20


class ExactReader:
    """Reads pieces of known sizes from a stream; `at` is the offset in the uncompressed bytes."""

    def __init__(
        self, path: Path, stream: BinaryIO, hashes: Mapping[str, str] | None = None, block_bytes: int = BLOCK_BYTES
    ) -> None:
        """`hashes` are hexadecimal digests of all bytes by algorithm; `finish` compares those it can compute."""
        self.path, self.at = path, 0
        self._stream, self._block_bytes = stream, block_bytes
        self._expected = dict(hashes or {})
        self._hashers = {name: hasher for name in self._expected if (hasher := _hasher(name)) is not None}

    def read(self, size_bytes: int) -> bytes:
        """Return the next bytes, so many of them."""
        if size_bytes > MAX_PIECE_BYTES:
            raise damaged(
                f"{self.path}: {size_bytes} bytes in one piece at byte {self.at}, more than {MAX_PIECE_BYTES}"
            )
        return b"".join(self._blocks(size_bytes))

    def skip(self, size_bytes: int) -> None:
        """Pass over bytes."""
        for _ in self._blocks(size_bytes):
            pass

    def unpacking(self, size_bytes: int) -> "ExactReader":
        """Return a reader of what the next bytes hold, which zstd packed."""
        return ExactReader(self.path, _unpacked(self.read(size_bytes)))

    def unpack(self, size_bytes: int) -> "tuple[ExactReader, int]":
        """Return a reader of what the next bytes hold, which zstd packed, and its size."""
        packed, content = self.unpacking(size_bytes), bytearray()
        while (block := packed._take(self._block_bytes)) and len(content) <= MAX_PIECE_BYTES:
            content += block
        return ExactReader(self.path, BytesIO(content)), len(content)

    def finish(self) -> None:
        """Make sure that nothing follows, and that the hashes hold."""
        if self._take(1):
            raise damaged(f"{self.path} goes on after byte {self.at}, where it should end")
        for name, hasher in self._hashers.items():
            if hasher.hexdigest() != self._expected[name]:
                raise damaged(f"{self.path} is damaged: its {name} does not hold")

    def offsets(self, count: int) -> Int64s:
        """Return a table of u32 offsets; its count must have been checked against the size of the file."""
        return np.frombuffer(self.read(4 * count), "<u4").astype(np.int64)

    def _blocks(self, size_bytes: int) -> Iterator[bytes]:
        while size_bytes:
            block = self._take(min(size_bytes, self._block_bytes))
            if not block:
                raise damaged(f"{self.path} is truncated: {size_bytes} bytes are missing at {self.at}")
            for hasher in self._hashers.values():
                hasher.update(block)
            self.at += len(block)
            size_bytes -= len(block)
            yield block

    def _take(self, size_bytes: int) -> bytes:
        with reading(self.path):
            try:
                return self._stream.read(size_bytes)
            except (gzip.BadGzipFile, zlib.error, zstandard.ZstdError, EOFError) as error:
                raise damaged(f"{self.path} is truncated or damaged: {error}") from None


def damaged(what: str) -> CheckFailed:
    """Return the error of a file that is not what something else has promised."""
    return CheckFailed(what, hint=AGAIN)


@contextmanager
def open_exactly(
    path: Path, compression: str = "", hashes: Mapping[str, str] | None = None, block_bytes: int = BLOCK_BYTES
) -> Iterator[ExactReader]:
    """Open a file, compressed as one of `COMPRESSIONS` says."""
    with open_binary(path) as file:
        stream: Any = file
        if compression:
            stream = gzip.GzipFile(fileobj=file) if compression == "gz" else _unpacked(file)
        yield ExactReader(path, stream, hashes, block_bytes)


@contextmanager
def open_binary(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading; UserError if it is missing, StorageError if it cannot be read."""
    with reading(path):
        try:
            file = path.open("rb")
        except FileNotFoundError:
            raise UserError(f"{path} is missing", hint=listing(path)) from None
    with file:
        yield file


def _unpacked(packed: BinaryIO | bytes) -> Any:
    return zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True, closefd=False)


def _hasher(name: str) -> Any:
    if name in xxhash.algorithms_available:
        return getattr(xxhash, name)()
    return hashlib.new(name) if name in hashlib.algorithms_available and not name.startswith("shake") else None
