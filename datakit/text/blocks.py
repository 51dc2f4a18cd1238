"""Blocks: the bytes of a slice of a file, uncompressed, at most a few hundred KiB at a time."""

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import xxhash
import zstandard

from datakit.text.inputs import FileSlice, InputFile
from threefold.errors import StorageError, UserError

READ_BYTES = 256 << 10  # well below what an allocator takes from the system again each time
_PACKED_READ_BYTES = 8 << 10  # zstd may expand a few bytes to 128 KiB: small reads bound what comes out at once
_ZSTD_WINDOW_BYTES = 1 << 31  # archives made with `zstd --long=31` need it; memory is what a file's own window takes


def read_blocks(
    part: FileSlice, digest: "xxhash.xxh3_64 | None" = None, read_bytes: int = READ_BYTES
) -> Iterator[bytes]:
    """Return the uncompressed bytes of a slice, piece by piece; `digest` takes the bytes as they are in the file.

    UserError if compressed data is truncated or damaged, or if the file became shorter.
    """
    path = part.file.path
    with part.file.open(stop=part.stop) as file:
        stream = file if digest is None else _Digesting(file, digest)
        try:
            yield from _unpacked(stream, part, read_bytes)
        except EOFError:
            raise UserError(
                f"{path} is truncated: its compressed data ends too early", hint="copy or download it again"
            ) from None
        except (zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
            raise _damaged(path, error) from None
        except OSError as error:
            if error.errno is None:  # gzip and bz2 say so what is wrong with their data
                raise _damaged(path, error) from None
            raise StorageError(f"cannot read {path}: {error.strerror}", hint=part.file.hint("ls -l")) from error


def digest_of(file: InputFile, start: int, stop: int) -> str:
    """Return the XXH3-64 of the bytes [start, stop) of a file as they are there."""
    digest = xxhash.xxh3_64()
    with file.open(stop=stop) as stream:
        for block in _plain(stream, FileSlice(file, start, stop), READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


class _Digesting:
    """A stream whose bytes go through a digest as they are read."""

    def __init__(self, stream: BinaryIO, digest: "xxhash.xxh3_64") -> None:
        self._stream, self._digest = stream, digest
        self.seek = stream.seek

    def read(self, size: int = -1) -> bytes:
        block = self._stream.read(size)
        self._digest.update(block)
        return block


def _unpacked(stream: Any, part: FileSlice, read_bytes: int) -> Iterator[bytes]:
    match part.file.compression:
        case "gz":
            with gzip.GzipFile(fileobj=stream) as unpacked:
                yield from iter(lambda: unpacked.read(read_bytes), b"")
        case "zst":
            zstd = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
            yield from _frames(stream, zstd.decompressobj)
        case "xz":
            yield from _frames(stream, lzma.LZMADecompressor, read_bytes)
        case "bz2":
            yield from _frames(stream, bz2.BZ2Decompressor, read_bytes)
        case _:
            yield from _plain(stream, part, read_bytes)


def _plain(stream: Any, part: FileSlice, read_bytes: int) -> Iterator[bytes]:
    stream.seek(part.start)
    remaining = part.stop - part.start
    while remaining:
        block = stream.read(min(read_bytes, remaining))
        if not block:
            raise UserError(f"{part.file.path} became shorter while it was read", hint="rerun when it is complete")
        remaining -= len(block)
        yield block


def _frames(stream: Any, begin_frame: Callable[[], Any], *limit: int) -> Iterator[bytes]:
    """Return all frames of a file; EOFError if the last is cut off, which the libraries' own readers pass in silence.

    `limit` bounds what a decompressor that can be asked in pieces returns at once.
    """
    frame, begun = begin_frame(), False
    while packed := stream.read(_PACKED_READ_BYTES):
        while packed := packed if begun else packed.lstrip(b"\0"):  # xz pads with zeros
            begun = True
            if block := frame.decompress(packed, *limit):
                yield block
            while not (frame.eof or getattr(frame, "needs_input", True)):
                if block := frame.decompress(b"", *limit):
                    yield block
            if not frame.eof:
                break
            packed = frame.unused_data
            frame, begun = begin_frame(), False
    if begun:
        raise EOFError


def _damaged(path: str, error: Exception) -> UserError:
    return UserError(f"{path} is damaged: {error}", hint="copy or download it again")
