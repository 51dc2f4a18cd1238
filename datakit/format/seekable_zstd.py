"""Seekable zstd: independent zstd frames and, at the end of the file, a table of their sizes and checksums.

Any zstd tool decompresses such a file, for which the table is a skippable frame; a range is read by decompressing only
the frames that it touches. The format is zstd's published seekable format, version 0.1.0, with checksums. Memory is a
few MiB and 30 bytes a frame; sizes that a damaged table claims are checked before anything is allocated for them.
"""

import struct
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import numpy as np
import xxhash
import zstandard

from threefold.errors import CheckFailed, UserError
from threefold.storage import Buffer

# One request of about half a MiB reads any sample, which is what object stores serve well; in larger frames tokens
# compress hardly better, and smaller ones cost ratio and a longer table.
FRAME_BYTES = 1 << 20
MAX_FRAME_BYTES = 64 << 20
MAX_FRAMES = 5_000_000  # a table of 60 MB; 5 TB of content in frames of FRAME_BYTES
READ_BYTES = 8 << 20
DAMAGE_HINT = "restore the file from a copy, or make it again in another place"
_TAIL_BYTES = 1 << 16
_SKIPPABLE_MAGIC, _SEEKABLE_MAGIC = 0x184D2A5E, 0x8F92EAB1
_HEAD = struct.Struct("<II")  # magic, bytes that follow
_FOOTER = struct.Struct("<IBI")  # frames, flags, magic
_HAS_CHECKSUMS, _UNKNOWN_FLAGS = 0x80, 0x7C
Content = TypeVar("Content", bytes, memoryview)
_ENTRY = np.dtype([("packed_bytes", "<u4"), ("size_bytes", "<u4"), ("check", "<u4")])


def pack(
    blocks: Iterable[bytes], level: int, frame_bytes: int = FRAME_BYTES, *, max_frames: int = MAX_FRAMES
) -> Iterator[bytes]:
    """Yield the seekable file of these blocks' bytes, however they are cut: frame by frame, then the table.

    Every frame but the last holds `frame_bytes`. One version of the zstd library always makes the same bytes.
    """
    compressor = zstandard.ZstdCompressor(level=level, write_checksum=True, write_content_size=True)
    entries = bytearray()
    for frame in _cut(blocks, frame_bytes):
        if len(entries) == max_frames * _ENTRY.itemsize:
            raise UserError(f"a file of more than {max_frames} frames of {frame_bytes} bytes cannot be archived")
        packed = compressor.compress(frame)
        entries += struct.pack("<III", len(packed), len(frame), _check(frame))
        yield packed
    yield _HEAD.pack(_SKIPPABLE_MAGIC, len(entries) + _FOOTER.size) + bytes(entries)
    yield _FOOTER.pack(len(entries) // _ENTRY.itemsize, _HAS_CHECKSUMS, _SEEKABLE_MAGIC)


class SeekableReader:
    """Ranges of the content of one seekable file; safe to use from several threads if `read` is.

    `size_bytes` is the size of the content, `table` the raw bytes behind the last frame. Every damage is a CheckFailed
    that names the file and, if it is in one, the frame.
    """

    def __init__(
        self, name: str, packed_bytes: int, read: Callable[[int, int], Buffer], *, read_bytes: int = READ_BYTES
    ) -> None:
        """Read the table of a file of `packed_bytes`, of which `read(start, stop)` returns the bytes [start, stop)."""
        self.name, self._read, self._read_bytes = name, read, read_bytes
        self.table = self._read_table(packed_bytes)
        entries = np.frombuffer(self.table[_HEAD.size : -_FOOTER.size], _ENTRY)
        self.num_frames = len(entries)
        sizes, packed_sizes = entries["size_bytes"].astype(np.int64), entries["packed_bytes"].astype(np.int64)
        # beyond what zstd makes of incompressible content
        faulty = (sizes == 0) | (sizes > MAX_FRAME_BYTES) | (packed_sizes > sizes + sizes // 256 + 1024)
        if faulty.any():
            number = int(faulty.argmax())
            raise self._fault(f"its table has frame {number} of {packed_sizes[number]} bytes for {sizes[number]}")
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        self._packed_starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(packed_sizes)])
        self._checks = entries["check"]
        self.size_bytes = int(self._starts[-1])
        end = int(self._packed_starts[-1])
        if end + len(self.table) != packed_bytes:
            raise self._fault(f"its frames end at byte {end}, its table begins at {packed_bytes - len(self.table)}")

    @property
    def bounds(self) -> list[int]:
        """The bytes of the content at which frames begin, and its end."""
        return list(self._starts.tolist())

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop) of the content, of which only the frames that hold them are read."""
        if not 0 <= start <= stop <= self.size_bytes:
            raise IndexError(f"bytes [{start}, {stop}) of {self.size_bytes} in {self.name}")
        if start == stop:
            return b""
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        last = int(np.searchsorted(self._starts, stop, side="left"))
        content = b"".join(self.unpack(number, packed) for number, packed in self.packed_frames(first, last))
        before = start - int(self._starts[first])
        return content[before : before + stop - start]

    def packed_frames(
        self, first: int = 0, last: int | None = None, *, at_once: bool = False
    ) -> Iterator[tuple[int, memoryview]]:
        """Yield the frames [first, last) as they are stored, with their numbers: `read_bytes` at a time, or at once."""
        starts, last = self._packed_starts, self.num_frames if last is None else last
        while first < last:
            begin = int(starts[first])
            stop = int(np.searchsorted(starts[: last + 1], begin + self._read_bytes, side="right")) - 1
            stop = last if at_once else max(stop, first + 1)
            packed = memoryview(self._read(begin, int(starts[stop])))
            for number in range(first, stop):
                yield number, packed[int(starts[number]) - begin : int(starts[number + 1]) - begin]
            first = stop

    def unpack(self, number: int, packed: memoryview) -> bytes:
        """Return the content of one frame, checked; CheckFailed if it is damaged."""
        decompressor = zstandard.ZstdDecompressor()
        return self._checked(number, packed, lambda _: decompressor.decompress(packed, allow_extra_data=False))

    def unpack_into(self, out: memoryview, number: int, packed: memoryview) -> memoryview:
        """Return the content of one frame at the beginning of `out`: to clear new memory takes longer than zstd.

        CheckFailed if it is damaged; what follows the frame in `packed` is not looked at.
        """
        stream = zstandard.ZstdDecompressor().stream_reader(packed)
        return self._checked(number, packed, lambda size_bytes: out[: stream.readinto(out[:size_bytes])])

    def _checked(self, number: int, packed: memoryview, unpack: Callable[[int], Content]) -> Content:
        size_bytes = int(self._starts[number + 1] - self._starts[number])
        try:
            # the frame's own header decides how much is allocated
            declared = zstandard.frame_content_size(packed)
            if declared != size_bytes:
                raise self._fault(f"frame {number} is damaged: it says {declared} bytes, the table {size_bytes}")
            content = unpack(size_bytes)
        except zstandard.ZstdError as error:
            raise self._fault(
                f"frame {number} is damaged: {str(error).removeprefix('decompression error: ')}"
            ) from None
        if len(content) != size_bytes or _check(content) != self._checks[number]:
            raise self._fault(f"frame {number} is damaged: its checksum does not hold")
        return content

    def _read_table(self, packed_bytes: int) -> bytes:
        if packed_bytes < _HEAD.size + _FOOTER.size:
            raise self._fault(f"it has {packed_bytes} bytes, too few for a table of frames")
        tail = self._read(max(packed_bytes - _TAIL_BYTES, 0), packed_bytes)
        num_frames, flags, magic = _FOOTER.unpack_from(tail, len(tail) - _FOOTER.size)
        if magic != _SEEKABLE_MAGIC:
            raise self._fault(f"it ends with {magic:#010x}, no table of frames")
        if not flags & _HAS_CHECKSUMS or flags & _UNKNOWN_FLAGS:
            raise self._fault(f"its table has the flags {flags:#04x}, {_HAS_CHECKSUMS:#04x} expected")
        table_bytes = _HEAD.size + num_frames * _ENTRY.itemsize + _FOOTER.size
        if num_frames > MAX_FRAMES or table_bytes > packed_bytes:
            raise self._fault(f"its table claims {num_frames} frames")
        if table_bytes > len(tail):
            tail = self._read(packed_bytes - table_bytes, packed_bytes)
        table = bytes(tail[len(tail) - table_bytes :])
        if _HEAD.unpack_from(table) != (_SKIPPABLE_MAGIC, table_bytes - _HEAD.size):
            raise self._fault(f"its table of {num_frames} frames does not begin where it should")
        return table

    def _fault(self, what: str) -> CheckFailed:
        return CheckFailed(f"{self.name}: {what}", hint=DAMAGE_HINT)


def _cut(blocks: Iterable[bytes], frame_bytes: int) -> Iterator[bytes | memoryview]:
    """Yield the same bytes in pieces of `frame_bytes`, the last one shorter where they do not divide."""
    rest = b""
    for block in blocks:
        joined = rest + block if rest else block
        whole = len(joined) - len(joined) % frame_bytes
        for start in range(0, whole, frame_bytes):
            yield memoryview(joined)[start : start + frame_bytes]
        rest = joined[whole:]
    if rest:
        yield rest


def _check(content: Buffer) -> int:
    """Return the low 32 bits of XXH64 with seed 0, which is also what zstd writes behind a frame's content."""
    return xxhash.xxh64_intdigest(content) & 0xFFFFFFFF
