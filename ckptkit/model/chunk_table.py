"""ChunkTable: many chunks as numpy columns, so that planning makes no Python object per chunk.

Boxes are left-padded to one number of dims (offset 0, shape 1), which changes no row-major position.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ckptkit.model.tensor import ITEMSIZE, Box, Piece, TensorInfo
from threefold.errors import UserError, listed

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TensorColumns:
    """Name, dtype and number of dims of T tensors; many tables share one object, and what is derived from it.

    `shapes` are the global ones, None where nothing says them.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    ndims: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...] | None = None

    @classmethod
    def of(cls, infos: Sequence[TensorInfo]) -> "TensorColumns":
        """Return the columns of a tensor table, in its order."""
        return cls(
            tuple(info.name for info in infos),
            tuple(info.dtype for info in infos),
            tuple(len(info.shape) for info in infos),
            tuple(info.shape for info in infos),
        )

    @cached_property
    def itemsize(self) -> Ints:
        """Bytes an element of each tensor."""
        return np.array([ITEMSIZE[dtype] for dtype in self.dtypes], np.int64)

    @cached_property
    def num_dims(self) -> Ints:
        """`ndims` as an array."""
        return np.array(self.ndims, np.int64)

    def padded_shapes(self, num_dims: int) -> Ints:
        """Return the shapes, [T, D], left-padded as boxes are."""
        return _padded(self.shapes or (), num_dims, 1)

    @cached_property
    def json_names(self) -> list[str]:
        """Each name as JSON writes it."""
        separator = "\n"  # which JSON escapes in a name
        return json.dumps(self.names, separators=(separator, ":"))[1:-1].split(separator)

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The place of each name."""
        return {name: number for number, name in enumerate(self.names)}


@dataclass(frozen=True, eq=False)
class ChunkTable:
    """Columns of N chunks over T tensors with at most D dims.

    tensor[N] indexes the tensors; offset[N, D] and shape[N, D] are boxes; start[N] and stop[N] are ranges of row-major
    positions in the boxes.
    """

    tensors: TensorColumns
    tensor: Ints
    offset: Ints
    shape: Ints
    start: Ints
    stop: Ints

    def __len__(self) -> int:
        return len(self.tensor)

    @classmethod
    def of(cls, chunks: Sequence[tuple[TensorInfo, Box, int, int]]) -> "ChunkTable":
        """Make the table of (tensor, box, start, stop); rows keep their order."""
        tensors = TensorColumns.of(list({info.name: info for info, *_ in chunks}.values()))
        num_dims = max(tensors.ndims, default=0)
        return cls(
            tensors,
            np.array([tensors.numbers[info.name] for info, *_ in chunks], np.int64),
            _padded([box.offset for _, box, _, _ in chunks], num_dims, 0),
            _padded([box.shape for _, box, _, _ in chunks], num_dims, 1),
            np.array([start for _, _, start, _ in chunks], np.int64),
            np.array([stop for *_, stop in chunks], np.int64),
        )

    @classmethod
    def whole(cls, tensors: TensorColumns) -> "ChunkTable":
        """Make the table of all tensors of known shapes, each a chunk."""
        shape = tensors.padded_shapes(max(tensors.ndims, default=0))
        zeros, stop = np.zeros(len(shape), np.int64), np.prod(shape, axis=1, dtype=np.int64)
        return cls(tensors, np.arange(len(shape)), np.zeros_like(shape), shape, zeros, stop)

    @classmethod
    def of_pieces(cls, pieces: Iterable[Piece], tensors: Iterable[TensorInfo]) -> "ChunkTable":
        """Make the table of pieces in their order; refuse, in one report, pieces that do not fit the tensor table."""
        infos, pieces = {info.name: info for info in tensors}, list(pieces)
        table = cls.fitting(pieces, infos)
        if table is not None:
            return table
        faults = [(piece.name, _misfit(piece, infos.get(piece.name))) for piece in pieces]
        if lines := [f"{name}: {fault}" for name, fault in faults if fault]:
            raise UserError(f"pieces do not fit the checkpoint's tensor table:{listed(lines)}")
        return cls.of([(infos[piece.name], piece.box, piece.start, piece.stop) for piece in pieces])

    @classmethod
    def fitting(cls, pieces: Sequence[Piece], infos: Mapping[str, TensorInfo]) -> "ChunkTable | None":
        """Make the table of pieces in their order, None if one may not fit its tensor: all are compared at once."""
        known = [(infos.get(piece.name), piece) for piece in pieces]
        chunks = [(info, piece.box, piece.start, piece.stop) for info, piece in known if info is not None]
        have_dims = all(len(box.offset) == len(box.shape) == len(info.shape) for info, box, *_ in chunks)
        if len(chunks) < len(pieces) or not have_dims:
            return None
        try:
            table = cls.of(chunks)
        except OverflowError:
            return None
        return table if table.fits() else None

    def fits(self) -> bool:
        """Return whether boxes are inside of their tensors, whose shapes are known, and ranges inside of boxes.

        False also for more elements than an int64 counts.
        """
        shapes = self.tensors.padded_shapes(self.offset.shape[1])[self.tensor]
        are_inside = (self.offset >= 0) & (self.shape >= 0) & (self.shape <= shapes)
        are_inside &= self.offset <= shapes - self.shape
        numel = np.prod(self.shape, axis=1, dtype=np.int64)
        return bool(are_inside.all() and ((self.start >= 0) & (self.start <= self.stop) & (self.stop <= numel)).all())

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors' names."""
        return self.tensors.names

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The tensors' dtypes."""
        return self.tensors.dtypes

    @cached_property
    def itemsize(self) -> Ints:
        """Bytes an element of each chunk."""
        return self.tensors.itemsize[self.tensor]

    @cached_property
    def size_bytes(self) -> Ints:
        """Bytes of each chunk."""
        return (self.stop - self.start) * self.itemsize

    def take(self, rows: npt.NDArray[np.integer] | slice) -> "ChunkTable":
        """Return some rows, in the given order, over the same tensors."""
        return ChunkTable(
            self.tensors, self.tensor[rows], self.offset[rows], self.shape[rows], self.start[rows], self.stop[rows]
        )

    def with_dims(self, num_dims: int) -> "ChunkTable":
        """Return the same chunks in boxes of another number of dims; if that is less, only padding is left out."""
        skip = max(self.offset.shape[1] - num_dims, 0)
        offset, shape = self.offset[:, skip:], self.shape[:, skip:]
        return replace(self, offset=left_padded(offset, num_dims, 0), shape=left_padded(shape, num_dims, 1))

    def box(self, row: int) -> Box:
        """Return the box of one chunk, without the padding dims."""
        skip = self.offset.shape[1] - self.tensors.ndims[self.tensor[row]]
        return Box(tuple(self.offset[row, skip:].tolist()), tuple(self.shape[row, skip:].tolist()))

    def bounds(self) -> tuple[list[Ints], list[Ints]]:
        """Return the smallest box around each chunk's range, a column a dim: first index, one past the last.

        Chunks without elements have no such box: theirs means nothing.
        """
        low, high = [], []
        first, last = self.start, self.stop - 1
        together = np.ones(len(self), bool)  # whether the range has one index only in all dims so far
        num_dims = self.offset.shape[1]
        strides = row_major_strides(self.shape)
        for dim in range(num_dims):
            first_index, last_index = first, last
            if dim + 1 < num_dims:
                first_index, last_index = first // strides[:, dim], last // strides[:, dim]
                first, last = first - first_index * strides[:, dim], last - last_index * strides[:, dim]
            low.append(self.offset[:, dim] + np.where(together, first_index, 0))
            high.append(self.offset[:, dim] + np.where(together, last_index + 1, self.shape[:, dim]))
            together &= first_index == last_index
        return low, high

    def renumbered(self, tensors: TensorColumns, numbers: Ints) -> "ChunkTable":
        """Return the same chunks over other tensors; numbers[t] is the place there of this table's tensor t."""
        return ChunkTable(tensors, numbers[self.tensor], self.offset, self.shape, self.start, self.stop)

    @staticmethod
    def concatenate(tables: Sequence["ChunkTable"]) -> "ChunkTable":
        """All rows of tables over the same tensors, in order."""
        assert tables, "at least one table"
        first, num_dims = tables[0], max(table.offset.shape[1] for table in tables)
        assert all(table.tensors is first.tensors for table in tables), "tables over the same tensors"
        return ChunkTable(
            first.tensors,
            np.concatenate([table.tensor for table in tables]),
            np.concatenate([left_padded(table.offset, num_dims, 0) for table in tables]),
            np.concatenate([left_padded(table.shape, num_dims, 1) for table in tables]),
            np.concatenate([table.start for table in tables]),
            np.concatenate([table.stop for table in tables]),
        )  # fmt: skip


def row_major_strides(shape: Ints) -> Ints:
    """How far apart, in row-major positions, neighbours along each dim of boxes of shape[N, D] stand; at least 1."""
    strides = np.ones_like(shape)
    for dim in range(shape.shape[1] - 2, -1, -1):
        strides[:, dim] = np.maximum(strides[:, dim + 1] * shape[:, dim + 1], 1)
    return strides


def _padded(rows: Sequence[tuple[int, ...]], num_dims: int, value: int) -> Ints:
    """Return boxes' offsets (value 0) or shapes (value 1) as an array; equal ones, which are many, are made once."""
    kinds = dict.fromkeys(rows)
    array = np.array([(value,) * (num_dims - len(row)) + row for row in kinds], np.int64).reshape(len(kinds), num_dims)
    if len(kinds) == len(rows):
        return array
    place = {row: number for number, row in enumerate(kinds)}
    return array[[place[row] for row in rows]]


def left_padded(columns: Ints, num_dims: int, value: int) -> Ints:
    """Boxes' offsets (value 0) or shapes (value 1) with more dims in front."""
    missing = num_dims - columns.shape[1]
    return np.pad(columns, ((0, 0), (missing, 0)), constant_values=value) if missing else columns


def _misfit(piece: Piece, info: TensorInfo | None) -> str | None:
    if info is None:
        return "not in the table"
    box = piece.box
    if len(box.offset) != len(info.shape) or len(box.shape) != len(info.shape):
        return f"box {box.offset}+{box.shape} has other dims than shape {list(info.shape)}"
    if any(a < 0 or n < 0 or a + n > size for a, n, size in zip(box.offset, box.shape, info.shape, strict=True)):
        return f"box {box.offset}+{box.shape} leaves shape {list(info.shape)}"
    if not 0 <= piece.start <= piece.stop <= box.numel:
        return f"range [{piece.start}, {piece.stop}) leaves its box of {box.numel} elements"
    return None


def ramps(first: Ints, counts: Ints) -> Ints:
    """first[i], first[i] + 1, ... counts[i] numbers for each i, one after the other."""
    ends = np.cumsum(counts)
    ramp: Ints = np.arange(ends[-1] if len(ends) else 0) + np.repeat(first - (ends - counts), counts)
    return ramp


def cut(sizes: Ints, block_bytes: int) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Cut sources of some sizes (none 0), which follow each other, where a block ends.

    Return for each segment its source, its offset there, its block, its place in the block and its size: sizes [3, 4]
    in blocks of 5 are the segments (0, 0, 0, 0, 3), (1, 0, 0, 3, 2) and (1, 2, 1, 0, 2).
    """
    stops = np.cumsum(sizes)
    starts = stops - sizes
    first, last = starts // block_bytes, (stops - 1) // block_bytes
    counts = last - first + 1
    source = np.repeat(np.arange(len(sizes)), counts)
    block = np.arange(len(source)) + np.repeat(first - (np.cumsum(counts) - counts), counts)
    begin = np.maximum(starts[source], block * block_bytes)
    size = np.minimum(stops[source], (block + 1) * block_bytes) - begin
    return source, begin - starts[source], block, begin - block * block_bytes, size
