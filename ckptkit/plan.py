"""Plans of copies, made by pure functions: `plan_save` lays chunks out in files, `plan_load` cuts what is wanted from
what is stored.

A stored or wanted chunk is a range of row-major positions inside a box. Two boxes share a box; the two chunks share the
part of it that lies in both ranges, which is a list of runs contiguous on both sides. Row-major positions grow with the
run's number on both sides, so the runs inside both ranges are found by bisection and no other run is ever made. Cost:
O(pairs of chunks of one tensor * log runs + runs), in numpy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckptkit.chunk import Piece
from ckptkit.chunk_table import ChunkTable, Ints, TensorColumns, left_padded, row_major_strides
from ckptkit.format.data_file import MAX_CHUNKS, DataFile
from ckptkit.format.part_index import PartIndex
from ckptkit.tensor import TensorInfo, storage_order
from threefold.errors import CheckFailed, listed


@dataclass(frozen=True, eq=False)
class SavePlan:
    """One writer's data files; rows[f] are the numbers of the pieces in file f, in file order."""

    files: tuple[DataFile, ...]
    rows: tuple[Ints, ...]


@dataclass(frozen=True, eq=False)
class Bounds:
    """The smallest box around all that is wanted of each tensor of a table: [low, high) in each dim, [D, T] each.

    It tells at once of most stored chunks that none of their elements are wanted.
    """

    low: Ints
    high: Ints

    @classmethod
    def of(cls, wanted: ChunkTable, tensors: TensorColumns) -> "Bounds":
        """The bounds of wanted chunks, whose names must be among the table's; of no tensor that is not wanted."""
        num_dims = max(tensors.ndims, default=0)
        low = np.full((num_dims, len(tensors.names)), np.iinfo(np.int64).max)
        high = np.full_like(low, -1)
        rows = wanted.take(np.flatnonzero(wanted.start < wanted.stop))
        rows = rows.renumbered(tensors, _numbers(rows.tensors, tensors, "what is wanted"))
        for dim, (first, last) in enumerate(zip(*rows.with_dims(num_dims).bounds(), strict=True)):
            np.minimum.at(low[dim], rows.tensor, first)
            np.maximum.at(high[dim], rows.tensor, last)
        return cls(low, high)

    def rows(self, chunks: ChunkTable) -> Ints:
        """The rows of chunks over the same tensors that may hold wanted elements."""
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

    def take(self, rows: Ints) -> "StoredChunks":
        """Some chunks, in the given order."""
        return StoredChunks(self.chunks.take(rows), self.part[rows], self.offset[rows])


class PartJoin:
    """Joins part indexes one by one over a checkpoint's tensor table; what lies out of bounds is never held."""

    def __init__(self, tensors: Sequence[TensorInfo], bounds: Bounds | None = None) -> None:
        self.tensors = TensorColumns.of(tensors)
        self._bounds = bounds
        self._numbers: dict[TensorColumns, Ints] = {}  # by identity: indexes of equal names share their columns

    def of(self, part: int, index: PartIndex, where: str) -> StoredChunks:
        """The chunks of one part, in file order; CheckFailed where its index, at `where`, does not fit the table."""
        numbers = self._numbers.get(index.chunks.tensors)
        if numbers is None:
            numbers = self._numbers[index.chunks.tensors] = _numbers(index.chunks.tensors, self.tensors, where)
        chunks = index.chunks.renumbered(self.tensors, numbers)
        stored = StoredChunks(chunks, np.full(len(chunks), part), index.offsets)
        return stored if self._bounds is None else stored.take(self._bounds.rows(chunks))

    def joined(self, parts: Sequence[StoredChunks]) -> StoredChunks:
        """The chunks of several parts, sorted by tensor, then in the order of the parts."""
        none = np.empty(0, np.int64)
        empty = ChunkTable(self.tensors, none, none.reshape(0, 0), none.reshape(0, 0), none, none)
        chunks = ChunkTable.concatenate([empty, *(part.chunks for part in parts)])
        order = np.argsort(chunks.tensor, kind="stable")
        part = np.concatenate([none, *(part.part for part in parts)])
        offset = np.concatenate([none, *(part.offset for part in parts)])
        return StoredChunks(chunks, part, offset).take(order)


def _numbers(columns: TensorColumns, table: TensorColumns, where: str) -> Ints:
    """The place in a table of each tensor of other columns; CheckFailed where it is not there as it should be."""
    numbers = []
    for name, dtype, ndim in zip(columns.names, columns.dtypes, columns.ndims, strict=True):
        number = table.numbers.get(name, -1)
        if number < 0 or table.dtypes[number] != dtype or table.ndims[number] != ndim:
            raise CheckFailed(f"{where} holds {name} ({dtype}, {ndim} dims) unlike the tensor table")
        numbers.append(number)
    return np.array(numbers, np.int64)


@dataclass(frozen=True, eq=False)
class LoadPlan:
    """Copies, sorted by part and source offset: `size` bytes from `source` in file `part` to byte `target` of a wanted
    chunk's data."""

    part: Ints
    source: Ints
    wanted: Ints
    target: Ints
    size: Ints

    def __len__(self) -> int:
        return len(self.part)

    def take(self, rows: npt.NDArray[np.integer] | slice) -> "LoadPlan":
        """Some copies, in the given order."""
        return LoadPlan(self.part[rows], self.source[rows], self.wanted[rows], self.target[rows], self.size[rows])


def storage_rows(chunks: ChunkTable, tensors: Sequence[TensorInfo]) -> Ints:
    """The rows of chunks that hold elements, in the order in which every writer stores them."""
    rank = {info.name: i for i, info in enumerate(sorted(tensors, key=storage_order))}
    ranks = np.array([rank[name] for name in chunks.names], np.int64)[chunks.tensor]
    columns = [chunks.offset[:, dim] for dim in range(chunks.offset.shape[1])]
    order = np.lexsort([chunks.start, *reversed(columns), ranks])
    return order[chunks.stop[order] > chunks.start[order]]


def plan_save(pieces: Sequence[Piece], tensors: Sequence[TensorInfo], *, max_chunks: int = MAX_CHUNKS) -> SavePlan:
    """The files in which one writer stores its pieces; always at least one. UserError where pieces do not fit."""
    chunks = ChunkTable.of_pieces(pieces, tensors)
    return plan_files(chunks, storage_rows(chunks, tensors), max_chunks=max_chunks)


def plan_files(chunks: ChunkTable, order: Ints, *, max_chunks: int = MAX_CHUNKS) -> SavePlan:
    """The files in which one writer stores its chunks, given their numbers in storage order."""
    rows = tuple(order[i : i + max_chunks] for i in range(0, max(len(order), 1), max_chunks))
    return SavePlan(tuple(DataFile.of(chunks.take(part)) for part in rows), rows)


def plan_load(wanted: ChunkTable, stored: StoredChunks) -> LoadPlan:
    """The copies that fill every wanted chunk; CheckFailed reports elements that are stored never or more than once.

    The names of `wanted` must be among the stored ones.
    """
    tensor = wanted.tensor
    if wanted.tensors is not stored.chunks.tensors:
        numbers = stored.chunks.tensors.numbers
        tensor = np.array([numbers[name] for name in wanted.names], np.int64)[tensor]
    first = np.searchsorted(stored.chunks.tensor, tensor, "left")
    counts = np.searchsorted(stored.chunks.tensor, tensor, "right") - first
    pair_wanted = np.repeat(np.arange(len(wanted)), counts)
    pair_stored = ramps(first, counts)
    runs = _runs(wanted, pair_wanted, stored.chunks, pair_stored)

    itemsize = wanted.itemsize[pair_wanted[runs.pair]]
    row_wanted, row_stored = pair_wanted[runs.pair], pair_stored[runs.pair]
    part = stored.part[row_stored]
    source = stored.offset[row_stored] + (runs.stored - stored.chunks.start[row_stored]) * itemsize
    target = (runs.wanted - wanted.start[row_wanted]) * itemsize
    order = np.lexsort([source, part])
    plan = _joined(LoadPlan(part, source, row_wanted, target, runs.length * itemsize).take(order))
    _check_cover(plan, wanted)
    return plan


@dataclass(frozen=True, eq=False)
class _Runs:
    """Elements [wanted, wanted + length) of one box are [stored, stored + length) of the other, for a pair of rows."""

    pair: Ints
    wanted: Ints
    stored: Ints
    length: Ints


def _runs(wanted: ChunkTable, rows_wanted: Ints, stored: ChunkTable, rows_stored: Ints) -> _Runs:
    num_dims = max(wanted.offset.shape[1], stored.offset.shape[1], 1)
    a = _Boxes(wanted.take(rows_wanted), num_dims)
    b = _Boxes(stored.take(rows_stored), num_dims)
    low = np.maximum(a.offset, b.offset)
    shape = np.minimum(a.offset + a.shape, b.offset + b.shape) - low
    meet = (shape > 0).all(axis=1) & (a.start < a.stop) & (b.start < b.stop)
    pairs = np.flatnonzero(meet)
    a, b, low, shape = a.take(pairs), b.take(pairs), low[pairs], shape[pairs]

    # A run spans the trailing dims that the shared box fills on both sides, and one dim before them.
    full = (shape == a.shape) & (shape == b.shape)
    after_full = np.ones_like(full)
    after_full[:, :-1] = np.logical_and.accumulate(full[:, :0:-1], axis=1)[:, ::-1]
    length = np.prod(np.where(after_full, shape, 1), axis=1, dtype=np.int64)
    outer = np.where(after_full, 1, shape)
    num_runs = np.prod(outer, axis=1, dtype=np.int64)
    a_base, b_base = ((low - a.offset) * a.strides).sum(axis=1), ((low - b.offset) * b.strides).sum(axis=1)

    def positions(rows: Ints | slice, run: Ints) -> tuple[Ints, Ints]:
        """Where a run begins in both boxes."""
        a_at, b_at, rest = a_base[rows].copy(), b_base[rows].copy(), run.copy()
        for dim in range(num_dims - 1, -1, -1):
            rest, index = np.divmod(rest, outer[rows, dim])
            a_at += index * a.strides[rows, dim]
            b_at += index * b.strides[rows, dim]
        return a_at, b_at

    def reaches_in(run: Ints) -> npt.NDArray[np.bool_]:
        a_at, b_at = positions(slice(None), run)
        reached: npt.NDArray[np.bool_] = (a_at + length > a.start) & (b_at + length > b.start)
        return reached

    def is_past(run: Ints) -> npt.NDArray[np.bool_]:
        a_at, b_at = positions(slice(None), run)
        past: npt.NDArray[np.bool_] = (a_at >= a.stop) | (b_at >= b.stop)
        return past

    begin, end = _bisect(reaches_in, num_runs), _bisect(is_past, num_runs)
    counts = np.maximum(end - begin, 0)
    row = np.repeat(np.arange(len(pairs)), counts)
    a_at, b_at = positions(row, ramps(begin, counts))
    cut = np.maximum(np.maximum(a.start[row] - a_at, b.start[row] - b_at), 0)
    stop = np.minimum(np.minimum(a.stop[row] - a_at, b.stop[row] - b_at), length[row])
    keep = stop > cut
    return _Runs(pairs[row[keep]], (a_at + cut)[keep], (b_at + cut)[keep], (stop - cut)[keep])


class _Boxes:
    """The boxes and ranges of chunks over a common number of dims, with the boxes' row-major strides."""

    def __init__(self, chunks: ChunkTable, num_dims: int) -> None:
        self.offset = left_padded(chunks.offset, num_dims, 0)
        self.shape = left_padded(chunks.shape, num_dims, 1)
        self.start, self.stop = chunks.start, chunks.stop
        self.strides = row_major_strides(self.shape)

    def take(self, rows: Ints) -> "_Boxes":
        taken = object.__new__(_Boxes)
        for name in ("offset", "shape", "start", "stop", "strides"):
            setattr(taken, name, getattr(self, name)[rows])
        return taken


def _bisect(holds: Callable[[Ints], npt.NDArray[np.bool_]], counts: Ints) -> Ints:
    """For each row the first number below its count for which a monotone predicate holds, else the count."""
    low, high = np.zeros_like(counts), counts.copy()
    while (low < high).any():
        middle = (low + high) // 2
        held = holds(np.minimum(middle, np.maximum(counts - 1, 0)))
        active = low < high
        high = np.where(active & held, middle, high)
        low = np.where(active & ~held, middle + 1, low)
    return low


def ramps(first: Ints, counts: Ints) -> Ints:
    """first[i], first[i] + 1, ... counts[i] numbers for each i, one after the other."""
    ends = np.cumsum(counts)
    ramp: Ints = np.arange(ends[-1] if len(ends) else 0) + np.repeat(first - (ends - counts), counts)
    return ramp


def _joined(plan: LoadPlan) -> LoadPlan:
    """Copies that continue each other on both sides become one."""
    if not len(plan):
        return plan
    ends_source, ends_target = plan.source + plan.size, plan.target + plan.size
    begins = np.ones(len(plan), bool)
    begins[1:] = (
        (plan.part[1:] != plan.part[:-1])
        | (plan.wanted[1:] != plan.wanted[:-1])
        | (plan.source[1:] != ends_source[:-1])
        | (plan.target[1:] != ends_target[:-1])
    )
    rows = np.flatnonzero(begins)
    size = np.add.reduceat(plan.size, rows)
    return LoadPlan(plan.part[rows], plan.source[rows], plan.wanted[rows], plan.target[rows], size)


def _check_cover(plan: LoadPlan, wanted: ChunkTable) -> None:
    order = np.lexsort([plan.target, plan.wanted])
    row, begin, end = plan.wanted[order], plan.target[order], (plan.target + plan.size)[order]
    expected = np.zeros(len(order), np.int64)  # where each copy has to begin
    same = row[1:] == row[:-1]
    expected[1:][same] = end[:-1][same]
    copied = np.bincount(row, weights=plan.size[order], minlength=len(wanted)).astype(np.int64)
    faulty = np.zeros(len(wanted), bool)
    faulty[row[begin != expected]] = True
    faulty |= copied != wanted.size_bytes
    if not faulty.any():
        return
    lines = [_uncovered(wanted, row, int(copied[row])) for row in np.flatnonzero(faulty).tolist()]
    raise CheckFailed(f"the checkpoint does not hold each wanted element exactly once:{listed(lines)}")


def _uncovered(wanted: ChunkTable, row: int, stored_bytes: int) -> str:
    box = wanted.box(row)
    return (
        f"{wanted.names[wanted.tensor[row]]} box {list(box.offset)}+{list(box.shape)} [{wanted.start[row]}, "
        f"{wanted.stop[row]}): {wanted.size_bytes[row]} bytes wanted, {stored_bytes} stored"
    )
