"""PartIndex: what one data file holds and the checksum of each of its granules, as a columnar binary file.

Little-endian; the exact layout is in docs/formats/checkpoint.md. Sizes are checked against caps and against the file's
own length before anything is allocated by them.
"""

import struct
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ckptkit.chunk_table import ChunkTable, Ints
from ckptkit.io.blocks import Columns, num_granules, xxh3_64
from ckptkit.tensor import MAX_DIMS, MAX_NAME_BYTES, MAX_NUMEL
from threefold.errors import CheckFailed, UserError

MAGIC, VERSION = b"CKPTIDX\0", 1
MAX_INDEX_BYTES = 1 << 30
MAX_DATA_BYTES = 1 << 50
_HEADER = struct.Struct("<8sIIQQQQQQ")
# dtype codes of the format: never renumbered, only appended to
DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2")


@dataclass(frozen=True, eq=False)
class PartIndex:
    """The chunks of one data file, back to back in row order from `data_offset` to the file's end."""

    chunks: ChunkTable
    data_offset: int
    size_bytes: int
    checksums: Columns

    @cached_property
    def offsets(self) -> Ints:
        """The file offset of each chunk."""
        sizes = self.chunks.size_bytes
        return self.data_offset + np.cumsum(sizes) - sizes

    def to_bytes(self) -> bytes:
        """The index file."""
        chunks = self.chunks
        names = [name.encode() for name in chunks.names]
        header = _HEADER.pack(
            MAGIC, VERSION, chunks.offset.shape[1], len(names), len(chunks), self.data_offset, self.size_bytes,
            sum(map(len, names)), len(self.checksums),
        )  # fmt: skip
        columns = [
            np.cumsum([len(name) for name in names], dtype="<u4").tobytes(),
            bytes(DTYPES.index(dtype) for dtype in chunks.dtypes),
            bytes(chunks.ndims),
            b"".join(names),
            chunks.tensor.astype("<u4").tobytes(),
            chunks.offset.astype("<i8").tobytes(),
            chunks.shape.astype("<i8").tobytes(),
            chunks.start.astype("<i8").tobytes(),
            chunks.stop.astype("<i8").tobytes(),
            self.checksums.astype("<u8").tobytes(),
        ]
        body = header + b"".join(column + bytes(-len(column) % 8) for column in columns)
        return body + struct.pack("<Q", xxh3_64(body))

    def tensors_between(self, start: int, stop: int) -> tuple[str, ...]:
        """The tensors that have elements among the file's bytes [start, stop), in file order."""
        rows = np.flatnonzero((self.offsets < stop) & (self.offsets + self.chunks.size_bytes > start))
        return tuple(dict.fromkeys(self.chunks.names[tensor] for tensor in self.chunks.tensor[rows].tolist()))

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> "PartIndex":
        """Read an index file; CheckFailed says what is wrong with it, `where` names it."""
        if len(data) < _HEADER.size + 8 or len(data) > MAX_INDEX_BYTES or data[:8] != MAGIC:
            raise CheckFailed(f"{where} is not a checkpoint's part index ({len(data)} bytes)")
        _, version, num_dims, num_tensors, num_chunks, data_offset, size_bytes, names_bytes, granules = (
            _HEADER.unpack_from(data)
        )
        if struct.unpack_from("<Q", data, len(data) - 8)[0] != xxh3_64(memoryview(data)[:-8]):
            raise CheckFailed(f"{where} is damaged: its checksum differs")
        if version != VERSION:
            raise UserError(
                f"{where} has format version {version}, this program reads {VERSION}", hint="pip install -U threefold"
            )
        if num_dims > MAX_DIMS or size_bytes > MAX_DATA_BYTES or not data_offset <= size_bytes:
            raise CheckFailed(f"{where}: {num_dims} dims, a file of {size_bytes} bytes with data from {data_offset}")
        if granules != num_granules(size_bytes):
            raise CheckFailed(f"{where}: {granules} checksums for a file of {size_bytes} bytes")
        counts = [num_tensors, num_tensors, num_tensors, names_bytes, num_chunks, num_chunks * num_dims,
                  num_chunks * num_dims, num_chunks, num_chunks, granules]  # fmt: skip
        dtypes = ["<u4", "u1", "u1", "u1", "<u4", "<i8", "<i8", "<i8", "<i8", "<u8"]
        columns: list[npt.NDArray[np.integer]] = []
        at = _HEADER.size
        for count, dtype in zip(counts, dtypes, strict=True):
            if at + count * np.dtype(dtype).itemsize > len(data) - 8:
                raise CheckFailed(f"{where} is shorter than its own counts")
            columns.append(np.frombuffer(data, dtype, count, at))
            at += -(-columns[-1].nbytes // 8) * 8
        if at != len(data) - 8:
            raise CheckFailed(f"{where} is longer than its own counts")
        name_ends, codes, ndims, blob, tensor, offset, shape, start, stop, found = columns
        chunks = ChunkTable(
            _names(name_ends.tolist(), blob.tobytes(), where),
            tuple(_dtype(code, where) for code in codes.tolist()),
            tuple(ndims.tolist()),
            tensor.astype(np.int64),
            offset.reshape(num_chunks, num_dims).astype(np.int64),
            shape.reshape(num_chunks, num_dims).astype(np.int64),
            start.astype(np.int64),
            stop.astype(np.int64),
        )
        _check_chunks(chunks, where)
        index = cls(chunks, data_offset, size_bytes, found.astype(np.uint64))
        held = sum(chunks.size_bytes.tolist())  # in Python: cannot overflow
        if held != size_bytes - data_offset:
            raise CheckFailed(f"{where}: chunks of {held} bytes in a data section of {size_bytes - data_offset}")
        return index


def _names(ends: list[int], blob: bytes, where: str) -> tuple[str, ...]:
    starts = [0, *ends[:-1]]
    try:
        names = tuple(blob[a:b].decode() for a, b in zip(starts, ends, strict=False))
    except UnicodeDecodeError:
        raise CheckFailed(f"{where}: a tensor name is not UTF-8") from None
    lengths_fit = all(0 < b - a <= MAX_NAME_BYTES for a, b in zip(starts, ends, strict=False))
    if not lengths_fit or (ends[-1] if ends else 0) != len(blob) or len(set(names)) != len(names):
        raise CheckFailed(f"{where}: broken tensor names")
    return names


def _dtype(code: int, where: str) -> str:
    if code >= len(DTYPES):
        raise CheckFailed(f"{where}: unknown dtype code {code}")
    return DTYPES[code]


def _check_chunks(chunks: ChunkTable, where: str) -> None:
    """Every column within its bounds, so that no later arithmetic can overflow, and wide dtypes first."""
    num_dims = chunks.offset.shape[1]
    if any(ndim > num_dims for ndim in chunks.ndims) or (len(chunks) and chunks.tensor.max() >= len(chunks.names)):
        raise CheckFailed(f"{where}: a chunk of no tensor")
    if (chunks.itemsize[1:] > chunks.itemsize[:-1]).any():
        raise CheckFailed(f"{where}: a wide dtype behind a narrow one")
    padding = np.arange(num_dims) < (num_dims - np.array(chunks.ndims, np.int64)[chunks.tensor])[:, None]
    sound = (chunks.offset >= 0) & (chunks.shape >= 0) & (chunks.offset <= MAX_NUMEL) & (chunks.shape <= MAX_NUMEL)
    sound &= ~padding | ((chunks.offset == 0) & (chunks.shape == 1))
    numel = np.prod(chunks.shape.astype(np.float64), axis=1)
    in_range = (chunks.start >= 0) & (chunks.start <= chunks.stop) & (chunks.stop <= numel) & (numel <= MAX_NUMEL)
    if not (sound.all() and in_range.all()):
        row = int(np.flatnonzero(~(sound.all(axis=1) & in_range))[0])
        raise CheckFailed(f"{where}: chunk {row} of {chunks.names[chunks.tensor[row]]} has an impossible box or range")
