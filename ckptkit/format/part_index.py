"""PartIndex: what one data file holds and the checksum of each of its granules, as a columnar binary file.

Little-endian; the exact layout is in docs/formats/checkpoint.md. Sizes are checked against caps and against the file's
own length before anything is allocated by them.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckptkit.io.blocks import Columns, num_granules, xxh3_64
from ckptkit.model.chunk_table import ChunkTable, Ints, TensorColumns
from ckptkit.model.tensor import MAX_DIMS, MAX_NAME_BYTES, MAX_NUMEL
from threefold.errors import CheckFailed, UserError
from threefold.installing import NEWER

MAGIC, VERSIONS = b"CKPTIDX\0", (1, 2)
MAX_INDEX_BYTES = 1 << 30
MAX_DATA_BYTES = 1 << 50
_HEADER = struct.Struct("<8sIHHQQQQQQ")
# dtype codes of the format: never renumbered, only appended to
DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2")


@dataclass(frozen=True, eq=False)
class PartIndex:
    """The chunks of one data file, back to back in row order from `data_offset` to the file's end.

    `sums` are what they add to the sum of each tensor, None in an index of version 1.
    """

    chunks: ChunkTable
    data_offset: int
    size_bytes: int
    checksums: Columns
    sums: Columns | None = None

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
        shapes = [] if self.sums is None else [chunks.tensors.padded_shapes(chunks.offset.shape[1])]
        width = 4 if all(column.max(initial=0) < 1 << 32 for column in (*numbers, *shapes)) else 8
        header = _HEADER.pack(
            MAGIC, VERSIONS[self.sums is not None], chunks.offset.shape[1], width, len(names), len(chunks),
            self.data_offset, self.size_bytes, sum(map(len, names)), len(self.checksums),
        )  # fmt: skip
        columns = [
            np.cumsum([len(name) for name in names], dtype="<u4").tobytes(),
            bytes(DTYPES.index(dtype) for dtype in chunks.dtypes),
            bytes(chunks.tensors.ndims),
            b"".join(names),
            *(column.astype(f"<u{width}").tobytes() for column in shapes),
            chunks.tensor.astype("<u4").tobytes(),
            *(column.astype(f"<u{width}").tobytes() for column in numbers),
            self.checksums.astype("<u8").tobytes(),
            b"" if self.sums is None else self.sums.astype("<u8").tobytes(),
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
        _, version, num_dims, width, num_tensors, num_chunks, data_offset, size_bytes, names_bytes, granules = (
            _checked_header(data, where)
        )
        number = f"<u{width}"
        num_sums = num_tensors if version > 1 else 0
        described = [(num_tensors, "<u4"), (num_tensors, "u1"), (num_tensors, "u1"), (names_bytes, "u1"),
                     (num_sums * num_dims, number)]  # fmt: skip
        columns = _columns(data, described, _HEADER.size, where)
        tensors_end = columns[-1].end
        columns += _columns(
            data,
            [(num_chunks, "<u4"), (num_chunks * num_dims, number), (num_chunks * num_dims, number),
             (num_chunks, number), (num_chunks, number), (granules, "<u8"), (num_sums, "<u8")],
            tensors_end,
            where,
        )  # fmt: skip
        if columns[-1].end != len(data) - 8:
            raise CheckFailed(f"{where} is longer than its own counts")
        key = data[8:24] + data[_HEADER.size : tensors_end]
        tensors = known.get(key) if known else None
        if tensors is None:
            tensors = _tensor_columns([column.values for column in columns[:4]], where)
            if version > 1:
                shapes = columns[4].values.astype(np.int64).reshape(num_tensors, num_dims)
                tensors = replace(tensors, shapes=_shapes(shapes, tensors, where))
            if known is not None:
                known[key] = tensors
        if any(column.values.max(initial=0) > MAX_NUMEL for column in columns[6:10]):
            raise CheckFailed(f"{where}: a chunk has an impossible box or range")
        tensor, offset, shape, start, stop = (column.values.astype(np.int64) for column in columns[5:10])
        boxes = (num_chunks, num_dims)
        chunks = ChunkTable(tensors, tensor, offset.reshape(boxes), shape.reshape(boxes), start, stop)
        _check_chunks(chunks, where)
        held = sum(chunks.size_bytes.tolist())  # in Python: cannot overflow
        if held != size_bytes - data_offset:
            raise CheckFailed(f"{where}: chunks of {held} bytes in a data section of {size_bytes - data_offset}")
        sums = columns[11].values.astype(np.uint64) if version > 1 else None
        return cls(chunks, data_offset, size_bytes, columns[10].values.astype(np.uint64), sums)


def _checked_header(data: bytes, where: str) -> tuple[int, ...]:
    """Return the numbers of an index file's header; CheckFailed where they or the file's checksum cannot be."""
    if len(data) < _HEADER.size + 8 or len(data) > MAX_INDEX_BYTES or data[:8] != MAGIC:
        raise CheckFailed(f"{where} is not a checkpoint's part index ({len(data)} bytes)")
    header: tuple[int, ...] = _HEADER.unpack_from(data)
    _, version, num_dims, width, _, _, data_offset, size_bytes, _, granules = header
    if struct.unpack_from("<Q", data, len(data) - 8)[0] != xxh3_64(memoryview(data)[:-8]):
        raise CheckFailed(f"{where} is damaged: its checksum differs")
    if version not in VERSIONS:
        raise UserError(
            f"{where} has format version {version}, this program reads {' and '.join(map(str, VERSIONS))}",
            hint=NEWER,
        )
    if num_dims > MAX_DIMS or size_bytes > MAX_DATA_BYTES or not data_offset <= size_bytes:
        raise CheckFailed(f"{where}: {num_dims} dims, a file of {size_bytes} bytes with data from {data_offset}")
    if width not in (4, 8):
        raise CheckFailed(f"{where}: numbers of {width} bytes")
    if granules != num_granules(size_bytes):
        raise CheckFailed(f"{where}: {granules} checksums for a file of {size_bytes} bytes")
    return header


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


def _shapes(padded: Ints, tensors: TensorColumns, where: str) -> tuple[tuple[int, ...], ...]:
    """Return the global shapes of tensors, which are left-padded to one number of dims."""
    num_dims = padded.shape[1]
    if padded.max(initial=0) > MAX_NUMEL or (np.prod(padded, axis=1, dtype=float) > MAX_NUMEL).any():
        raise CheckFailed(f"{where}: a tensor has an impossible shape")
    if max(tensors.ndims, default=0) > num_dims:
        raise CheckFailed(f"{where}: a tensor of more dims than boxes have")
    return tuple(tuple(row[num_dims - n :]) for row, n in zip(padded.tolist(), tensors.ndims, strict=True))


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
    if tensors.shapes is not None:
        sound &= (chunks.offset + chunks.shape <= tensors.padded_shapes(num_dims)[chunks.tensor]).all(axis=1)
    if not sound.all():
        row = int(np.flatnonzero(~sound)[0])
        raise CheckFailed(f"{where}: chunk {row} of {chunks.names[chunks.tensor[row]]} has an impossible box or range")
