"""PartIndex: what one data file holds and the checksum of each of its granules, as a columnar binary file.

Little-endian; the exact layout is in docs/formats/checkpoint.md. Sizes are checked against caps and against the file's
own length before anything is allocated by them.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckptkit.io.blocks import Columns, num_granules, xxh3_64
from ckptkit.model.chunk_table import ChunkTable, Ints, TensorColumns
from ckptkit.model.tensor import MAX_DIMS, MAX_NAME_BYTES, MAX_NUMEL
from threefold.errors import CheckFailed, UserError

MAGIC, VERSION = b"CKPTIDX\0", 1
MAX_INDEX_BYTES = 1 << 30
MAX_DATA_BYTES = 1 << 50
_HEADER = struct.Struct("<8sIHHQQQQQQ")
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
        """Return the index file."""
        chunks = self.chunks
        names = [name.encode() for name in chunks.names]
        numbers = (chunks.offset, chunks.shape, chunks.start, chunks.stop)
        width = 4 if all(column.max(initial=0) < 1 << 32 for column in numbers) else 8
        header = _HEADER.pack(
            MAGIC, VERSION, chunks.offset.shape[1], width, len(names), len(chunks), self.data_offset, self.size_bytes,
            sum(map(len, names)), len(self.checksums),
        )  # fmt: skip
        columns = [
            np.cumsum([len(name) for name in names], dtype="<u4").tobytes(),
            bytes(DTYPES.index(dtype) for dtype in chunks.dtypes),
            bytes(chunks.tensors.ndims),
            b"".join(names),
            chunks.tensor.astype("<u4").tobytes(),
            *(column.astype(f"<u{width}").tobytes() for column in numbers),
            self.checksums.astype("<u8").tobytes(),
        ]
        body = header + b"".join(column + bytes(-len(column) % 8) for column in columns)
        return body + struct.pack("<Q", xxh3_64(body))

    def tensors_between(self, start: int, stop: int) -> tuple[str, ...]:
        """Return the tensors that have elements among the file's bytes [start, stop), in file order."""
        rows = np.flatnonzero((self.offsets < stop) & (self.offsets + self.chunks.size_bytes > start))
        return tuple(dict.fromkeys(self.chunks.names[tensor] for tensor in self.chunks.tensor[rows].tolist()))

    @classmethod
    def from_bytes(cls, data: bytes, where: str, known: dict[bytes, TensorColumns] | None = None) -> "PartIndex":
        """Read an index file; CheckFailed says what is wrong with it, `where` names it.

        `known` keeps the tensor columns of indexes read before: those of equal ones are taken from there.
        """
        if len(data) < _HEADER.size + 8 or len(data) > MAX_INDEX_BYTES or data[:8] != MAGIC:
            raise CheckFailed(f"{where} is not a checkpoint's part index ({len(data)} bytes)")
        _, version, num_dims, width, num_tensors, num_chunks, data_offset, size_bytes, names_bytes, granules = (
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
        if width not in (4, 8):
            raise CheckFailed(f"{where}: numbers of {width} bytes")
        if granules != num_granules(size_bytes):
            raise CheckFailed(f"{where}: {granules} checksums for a file of {size_bytes} bytes")
        number = f"<u{width}"
        described = [(num_tensors, "<u4"), (num_tensors, "u1"), (num_tensors, "u1"), (names_bytes, "u1")]
        columns = _columns(data, described, _HEADER.size, where)
        tensors_end = columns[-1].end
        columns += _columns(
            data,
            [(num_chunks, "<u4"), (num_chunks * num_dims, number), (num_chunks * num_dims, number),
             (num_chunks, number), (num_chunks, number), (granules, "<u8")],
            tensors_end,
            where,
        )  # fmt: skip
        if columns[-1].end != len(data) - 8:
            raise CheckFailed(f"{where} is longer than its own counts")
        key = data[16:24] + data[_HEADER.size : tensors_end]
        tensors = known.get(key) if known else None
        if tensors is None:
            tensors = _tensor_columns([column.values for column in columns[:4]], where)
            if known is not None:
                known[key] = tensors
        if any(column.values.max(initial=0) > MAX_NUMEL for column in columns[5:9]):
            raise CheckFailed(f"{where}: a chunk has an impossible box or range")
        tensor, offset, shape, start, stop = (column.values.astype(np.int64) for column in columns[4:9])
        boxes = (num_chunks, num_dims)
        chunks = ChunkTable(tensors, tensor, offset.reshape(boxes), shape.reshape(boxes), start, stop)
        _check_chunks(chunks, where)
        held = sum(chunks.size_bytes.tolist())  # in Python: cannot overflow
        if held != size_bytes - data_offset:
            raise CheckFailed(f"{where}: chunks of {held} bytes in a data section of {size_bytes - data_offset}")
        return cls(chunks, data_offset, size_bytes, columns[9].values.astype(np.uint64))


class _Column(NamedTuple):
    values: npt.NDArray[np.integer]
    end: int  # of the column and its padding, in the file


def _columns(data: bytes, described: Sequence[tuple[int, str]], at: int, where: str) -> list[_Column]:
    """Return columns of (count, dtype) one after the other from a byte of the file."""
    columns = []
    for count, dtype in described:
        size = count * int(dtype[-1])
        if at + size > len(data) - 8:
            raise CheckFailed(f"{where} is shorter than its own counts")
        columns.append(_Column(np.frombuffer(data, dtype, count, at), at := at + -(-size // 8) * 8))
    return columns


def _tensor_columns(columns: Sequence[npt.NDArray[np.integer]], where: str) -> TensorColumns:
    ends, codes, ndims, blob = columns
    unknown = codes[codes >= len(DTYPES)]
    if len(unknown):
        raise CheckFailed(f"{where}: unknown dtype code {unknown[0]}")
    dtypes = tuple(DTYPES[code] for code in codes.tolist())
    return TensorColumns(_names(ends.tolist(), blob.tobytes(), where), dtypes, tuple(ndims.tolist()))


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


def _check_chunks(chunks: ChunkTable, where: str) -> None:
    """Boxes and ranges that can be, so that no later arithmetic can overflow, and wide dtypes first."""
    num_dims, tensors = chunks.offset.shape[1], chunks.tensors
    if max(tensors.ndims, default=0) > num_dims or chunks.tensor.max(initial=-1) >= len(tensors.names):
        raise CheckFailed(f"{where}: a chunk of no tensor")
    if (chunks.itemsize[1:] > chunks.itemsize[:-1]).any():
        raise CheckFailed(f"{where}: a wide dtype behind a narrow one")
    padding = num_dims - tensors.num_dims[chunks.tensor]
    numel = np.ones(len(chunks))  # as floats, which cannot overflow
    sound = chunks.start <= chunks.stop
    for dim in range(num_dims):
        numel *= chunks.shape[:, dim]
        if dim < num_dims - min(tensors.ndims, default=0):
            sound &= (dim >= padding) | ((chunks.offset[:, dim] == 0) & (chunks.shape[:, dim] == 1))
    sound &= (chunks.stop <= numel) & (numel <= MAX_NUMEL)
    if not sound.all():
        row = int(np.flatnonzero(~sound)[0])
        raise CheckFailed(f"{where}: chunk {row} of {chunks.names[chunks.tensor[row]]} has an impossible box or range")
