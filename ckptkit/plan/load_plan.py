"""Plan a load: cut what is wanted from what is stored, as a list of copies. Pure.

A stored or wanted chunk is a range of row-major positions inside a box. Two boxes share a box; the two chunks share the
part of it that is in both ranges, which is a list of runs contiguous on both sides. Row-major positions grow with the
run's number on both sides, so the runs inside both ranges are found by bisection and no other run is ever made. Cost:
O(pairs of chunks of one tensor * log runs + runs), in numpy.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckptkit.model.chunk_table import ChunkTable, Ints, left_padded, ramps, row_major_strides
from ckptkit.plan.stored import StoredChunks
from threefold.errors import CheckFailed, listed


@dataclass(frozen=True, eq=False)
class LoadPlan:
    """Copies, sorted by part and source offset: `size` bytes from `source` in file `part` to byte `target` of the data
    of the chunk that is requested in a `row`.
    """

    part: Ints
    source: Ints
    row: Ints
    target: Ints
    size: Ints

    def __len__(self) -> int:
        return len(self.part)

    def take(self, rows: npt.NDArray[np.integer] | slice) -> "LoadPlan":
        """Return some copies, in the given order."""
        return LoadPlan(self.part[rows], self.source[rows], self.row[rows], self.target[rows], self.size[rows])


def plan_load(request: ChunkTable, stored: StoredChunks) -> LoadPlan:
    """Return the copies that fill every wanted chunk; CheckFailed reports those stored never or more than once.

    The names of `request` must be among the stored ones.
    """
    tensor = request.tensor
    if request.tensors is not stored.chunks.tensors:
        numbers = stored.chunks.tensors.numbers
        tensor = np.array([numbers[name] for name in request.names], np.int64)[tensor]
    first = np.searchsorted(stored.chunks.tensor, tensor, "left")
    counts = np.searchsorted(stored.chunks.tensor, tensor, "right") - first
    pair_wanted = np.repeat(np.arange(len(request)), counts)
    pair_stored = ramps(first, counts)
    runs = _runs(request, pair_wanted, stored.chunks, pair_stored)

    itemsize = request.itemsize[pair_wanted[runs.pair]]
    row_wanted, row_stored = pair_wanted[runs.pair], pair_stored[runs.pair]
    part = stored.part[row_stored]
    source = stored.offset[row_stored] + (runs.stored - stored.chunks.start[row_stored]) * itemsize
    target = (runs.first - request.start[row_wanted]) * itemsize
    order = np.lexsort([source, part])
    plan = _joined(LoadPlan(part, source, row_wanted, target, runs.length * itemsize).take(order))
    _check_cover(plan, request)
    return plan


@dataclass(frozen=True, eq=False)
class _Runs:
    """Elements [first, first + length) of one box are [stored, stored + length) of the other, for a pair of rows."""

    pair: Ints
    first: Ints
    stored: Ints
    length: Ints


def _runs(request: ChunkTable, rows_wanted: Ints, stored: ChunkTable, rows_stored: Ints) -> _Runs:
    num_dims = max(request.offset.shape[1], stored.offset.shape[1], 1)
    a = _RangedBoxes(request.take(rows_wanted), num_dims)
    b = _RangedBoxes(stored.take(rows_stored), num_dims)
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

    def positions(rows: Ints, run: Ints) -> tuple[Ints, Ints]:
        """Where a run begins in both boxes."""
        a_at, b_at, rest = a_base[rows].copy(), b_base[rows].copy(), run.copy()
        for dim in range(num_dims - 1, -1, -1):
            rest, index = np.divmod(rest, outer[rows, dim])
            a_at += index * a.strides[rows, dim]
            b_at += index * b.strides[rows, dim]
        return a_at, b_at

    some = np.flatnonzero(a.are_cut | b.are_cut)  # all runs of the others are inside

    def reaches_in(run: Ints) -> npt.NDArray[np.bool_]:
        a_at, b_at = positions(some, run)
        reached: npt.NDArray[np.bool_] = (a_at + length[some] > a.start[some]) & (b_at + length[some] > b.start[some])
        return reached

    def is_past(run: Ints) -> npt.NDArray[np.bool_]:
        a_at, b_at = positions(some, run)
        past: npt.NDArray[np.bool_] = (a_at >= a.stop[some]) | (b_at >= b.stop[some])
        return past

    begin, end = np.zeros_like(num_runs), num_runs.copy()
    begin[some], end[some] = _bisect(reaches_in, num_runs[some]), _bisect(is_past, num_runs[some])
    counts = np.maximum(end - begin, 0)
    row = np.repeat(np.arange(len(pairs)), counts)
    a_at, b_at = positions(row, ramps(begin, counts))
    cut = np.maximum(np.maximum(a.start[row] - a_at, b.start[row] - b_at), 0)
    stop = np.minimum(np.minimum(a.stop[row] - a_at, b.stop[row] - b_at), length[row])
    keep = stop > cut
    return _Runs(pairs[row[keep]], (a_at + cut)[keep], (b_at + cut)[keep], (stop - cut)[keep])


class _RangedBoxes:
    """The boxes and ranges of chunks over a common number of dims, with the boxes' row-major strides."""

    def __init__(self, chunks: ChunkTable, num_dims: int) -> None:
        self.offset = left_padded(chunks.offset, num_dims, 0)
        self.shape = left_padded(chunks.shape, num_dims, 1)
        self.start, self.stop = chunks.start, chunks.stop
        self.strides = row_major_strides(self.shape)

    @property
    def are_cut(self) -> npt.NDArray[np.bool_]:
        """Whether a range is not all of its box."""
        cut: npt.NDArray[np.bool_] = (self.start > 0) | (self.stop < np.prod(self.shape, axis=1, dtype=np.int64))
        return cut

    def take(self, rows: Ints) -> "_RangedBoxes":
        taken = object.__new__(_RangedBoxes)
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


def _joined(plan: LoadPlan) -> LoadPlan:
    """Join copies that continue each other on both sides."""
    if not len(plan):
        return plan
    ends_source, ends_target = plan.source + plan.size, plan.target + plan.size
    begins = np.ones(len(plan), bool)
    begins[1:] = (
        (plan.part[1:] != plan.part[:-1])
        | (plan.row[1:] != plan.row[:-1])
        | (plan.source[1:] != ends_source[:-1])
        | (plan.target[1:] != ends_target[:-1])
    )
    rows = np.flatnonzero(begins)
    size = np.add.reduceat(plan.size, rows)
    return LoadPlan(plan.part[rows], plan.source[rows], plan.row[rows], plan.target[rows], size)


def _check_cover(plan: LoadPlan, request: ChunkTable) -> None:
    order = np.lexsort([plan.target, plan.row])
    row, begin, end = plan.row[order], plan.target[order], (plan.target + plan.size)[order]
    expected = np.zeros(len(order), np.int64)  # where each copy has to begin
    same = row[1:] == row[:-1]
    expected[1:][same] = end[:-1][same]
    copied = np.bincount(row, weights=plan.size[order], minlength=len(request)).astype(np.int64)
    faulty = np.zeros(len(request), bool)
    faulty[row[begin != expected]] = True
    faulty |= copied != request.size_bytes
    if not faulty.any():
        return
    lines = [_uncovered(request, row, int(copied[row])) for row in np.flatnonzero(faulty).tolist()]
    raise CheckFailed(f"the checkpoint does not hold each wanted element exactly once:{listed(lines)}")


def _uncovered(request: ChunkTable, row: int, stored_bytes: int) -> str:
    box = request.box(row)
    return (
        f"{request.names[request.tensor[row]]} box {list(box.offset)}+{list(box.shape)} [{request.start[row]}, "
        f"{request.stop[row]}): {request.size_bytes[row]} bytes wanted, {stored_bytes} stored"
    )
