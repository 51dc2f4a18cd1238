"""The chunks that a checkpoint stores, joined from its part indexes over one tensor table. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ckptkit.format.part_index import PartIndex
from ckptkit.model.chunk_table import ChunkTable, Ints, TensorColumns
from ckptkit.model.tensor import Box, TensorInfo
from threefold.errors import CheckFailed


@dataclass(frozen=True, eq=False)
class Bounds:
    """The smallest box around all that is wanted of each tensor of a table: [low, high) in each dim, [D, T] each.

    It rules out at once most stored chunks of which no element is wanted.
    """

    low: Ints
    high: Ints

    @classmethod
    def of(cls, request: ChunkTable, tensors: TensorColumns) -> "Bounds":
        """Return the bounds of wanted chunks, whose names must be among the table's.

        Of no tensor that is not wanted.
        """
        num_dims = max(tensors.ndims, default=0)
        low = np.full((num_dims, len(tensors.names)), np.iinfo(np.int64).max)
        high = np.full_like(low, -1)
        rows = request.take(np.flatnonzero(request.start < request.stop))
        rows = rows.renumbered(tensors, _numbers(rows.tensors, tensors, "what is wanted"))
        for dim, (first, last) in enumerate(zip(*rows.with_dims(num_dims).bounds(), strict=True)):
            np.minimum.at(low[dim], rows.tensor, first)
            np.maximum.at(high[dim], rows.tensor, last)
        return cls(low, high)

    def rows(self, chunks: ChunkTable) -> Ints:
        """Return the rows of chunks over the same tensors that may hold wanted elements."""
        num_dims = len(self.low)
        boxes, tensor = chunks.with_dims(num_dims), chunks.tensor
        keep = chunks.start < chunks.stop
        for dim in range(num_dims):  # whole boxes first: that takes no division
            offset, shape = boxes.offset[:, dim], boxes.shape[:, dim]
            keep &= (offset < self.high[dim][tensor]) & (offset + shape > self.low[dim][tensor])
        rows = np.flatnonzero(keep)
        tensor, near = tensor[rows], np.ones(len(rows), bool)
        for dim, (low, high) in enumerate(zip(*boxes.take(rows).bounds(), strict=True)):
            near &= (low < self.high[dim][tensor]) & (high > self.low[dim][tensor])
        return rows[near]


@dataclass(frozen=True, eq=False)
class StoredChunks:
    """Chunks of the parts of a checkpoint over its tensor table: the part and the file offset of each."""

    chunks: ChunkTable
    part: Ints
    offset: Ints

    @classmethod
    def of_boxes(cls, boxes: Iterable[tuple[TensorInfo, Box, int, int]]) -> "StoredChunks":
        """Return whole boxes of tensors, given the part and the offset of each."""
        rows = list(boxes)
        chunks = ChunkTable.of([(info, box, 0, box.numel) for info, box, *_ in rows])
        part, offset = np.array([place for *_, place, _ in rows], np.int64), np.array([at for *_, at in rows], np.int64)
        return cls(chunks, part, offset)

    def take(self, rows: Ints) -> "StoredChunks":
        """Return some chunks, in the given order."""
        return StoredChunks(self.chunks.take(rows), self.part[rows], self.offset[rows])


class PartJoin:
    """Joins part indexes one by one over a checkpoint's tensor table; what is out of bounds is never held."""

    def __init__(self, tensors: Sequence[TensorInfo], bounds: Bounds | None = None) -> None:
        self.tensors = TensorColumns.of(tensors)
        self._bounds = bounds
        self._numbers: dict[TensorColumns, Ints] = {}  # by identity: indexes of equal names share their columns

    def numbers(self, columns: TensorColumns, where: str) -> Ints:
        """Return the place in the table of each tensor of a part.

        CheckFailed where its index, at `where`, does not fit the table.
        """
        numbers = self._numbers.get(columns)
        if numbers is None:
            numbers = self._numbers[columns] = _numbers(columns, self.tensors, where)
        return numbers

    def of(self, part: int, index: PartIndex, where: str) -> StoredChunks:
        """Return the chunks of one part, in file order.

        CheckFailed where its index, at `where`, does not fit the table.
        """
        chunks = index.chunks.renumbered(self.tensors, self.numbers(index.chunks.tensors, where))
        stored = StoredChunks(chunks, np.full(len(chunks), part), index.offsets)
        return stored if self._bounds is None else stored.take(self._bounds.rows(chunks))

    def joined(self, parts: Sequence[StoredChunks]) -> StoredChunks:
        """Return the chunks of several parts, sorted by tensor, then in the order of the parts."""
        none = np.empty(0, np.int64)
        empty = ChunkTable(self.tensors, none, none.reshape(0, 0), none.reshape(0, 0), none, none)
        chunks = ChunkTable.concatenate([empty, *(part.chunks for part in parts)])
        order = np.argsort(chunks.tensor, kind="stable")
        part = np.concatenate([none, *(part.part for part in parts)])
        offset = np.concatenate([none, *(part.offset for part in parts)])
        return StoredChunks(chunks, part, offset).take(order)


def _numbers(columns: TensorColumns, table: TensorColumns, where: str) -> Ints:
    """Return the place in a table of each tensor of other columns.

    CheckFailed where it is not there as it should be.
    """
    places = [table.numbers.get(name, -1) for name in columns.names]
    described = [(columns.dtypes, table.dtypes), (columns.ndims, table.ndims)]
    if columns.shapes and table.shapes:
        described.append((columns.shapes, table.shapes))
    if -1 in places or any(list(own) != [others[place] for place in places] for own, others in described):
        _refuse(columns, places, table, where)
    return np.array(places, np.int64)


def _refuse(columns: TensorColumns, places: Sequence[int], table: TensorColumns, where: str) -> None:
    """Raise CheckFailed for the first tensor of columns that is not in a table as it should be."""
    for number, (name, dtype, ndim, place) in enumerate(
        zip(columns.names, columns.dtypes, columns.ndims, places, strict=True)
    ):
        if place < 0 or table.dtypes[place] != dtype or table.ndims[place] != ndim:
            raise CheckFailed(f"{where} holds {name} ({dtype}, {ndim} dims) unlike the tensor table")
        if columns.shapes and table.shapes and columns.shapes[number] != table.shapes[place]:
            shapes = f"{list(columns.shapes[number])}, the tensor table says {list(table.shapes[place])}"
            raise CheckFailed(f"{where} holds {name} of shape {shapes}")
