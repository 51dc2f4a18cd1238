"""Sharing: which rank reads which granules when several restore together; pure arithmetic on one line of granules.

The data files of a checkpoint, back to back, are one line of bytes and one of granules. What a rank wants are runs:
sorted, disjoint [first, stop) intervals of that line. A granule is read by one of those who want it, so what one rank
alone wants needs no exchange; where none of them can read it, by one that can. The loads of those who share are
levelled, each in long runs. Cost: O(ranks * runs) bytes and time, in numpy.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ckptkit.io.blocks import GRANULE_BYTES, num_granules
from ckptkit.model.chunk_table import Ints, ramps
from ckptkit.plan.load_plan import LoadPlan

Runs = npt.NDArray[np.int64]  # [N, 2]: first and stop of each
Rows = npt.NDArray[np.bool_]  # [ranks, pieces of the line]


class Line:
    """Data files of given sizes back to back: where files, bytes and granules stand on it."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._first_byte = np.cumsum([0, *sizes], dtype=np.int64)
        self._first_granule = np.cumsum([0, *map(num_granules, sizes)], dtype=np.int64)

    def bytes_of(self, runs: Runs) -> Runs:
        """Return the bytes of runs of granules."""
        file = np.searchsorted(self._first_granule, runs, "right") - 1
        found: Runs = self._first_byte[file] + (runs - self._first_granule[file]) * GRANULE_BYTES
        return found

    def spans(self, plan: LoadPlan) -> Runs:
        """Return the bytes that each copy of a plan reads, in its order."""
        start = self._first_byte[plan.part] + plan.source
        return np.stack([start, start + plan.size], axis=1)

    def granules(self, plan: LoadPlan) -> Runs:
        """Return the runs of granules that a plan reads."""
        first = self._first_granule[plan.part] + plan.source // GRANULE_BYTES
        stop = self._first_granule[plan.part] - -(plan.source + plan.size) // GRANULE_BYTES
        return joined_runs(np.stack([first, stop], axis=1))

    def of_files(self, numbers: Sequence[int]) -> Runs:
        """Return the runs of all granules of some files."""
        ends = self._first_granule
        found = [(ends[number], ends[number + 1]) for number in numbers if ends[number] < ends[number + 1]]
        return joined_runs(np.array(found, np.int64).reshape(-1, 2))

    def reads(self, runs: Runs) -> tuple[LoadPlan, Ints]:
        """Return reads of whole runs of granules, cut where files end.

        And how far into all the runs' bytes each begins.
        """
        spans = self.bytes_of(runs)
        files = np.stack([self._first_byte[:-1], self._first_byte[1:]], axis=1)
        file, run, begin, end = clipped(files, spans)
        offset = begins(spans)[run] + begin - spans[run, 0]
        zeros = np.zeros_like(file)
        return LoadPlan(file, begin - self._first_byte[file], zeros, zeros, end - begin), offset


def begins(spans: Runs) -> Ints:
    """Where each span begins when all lie one after the other."""
    sizes = spans[:, 1] - spans[:, 0]
    found: Ints = np.cumsum(sizes) - sizes
    return found


def joined_runs(runs: Runs) -> Runs:
    """Return the same granules as sorted, disjoint runs that do not touch each other."""
    runs = runs[np.argsort(runs[:, 0], kind="stable")]
    reach = np.maximum.accumulate(runs[:, 1])
    firsts = np.flatnonzero(np.r_[True, runs[1:, 0] > reach[:-1]][: len(runs)])
    lasts = np.r_[firsts[1:], len(runs)][: len(firsts)] - 1
    return np.stack([runs[firsts, 0], reach[lasts]], axis=1)


def clipped(spans: Runs, runs: Runs) -> tuple[Ints, Ints, Ints, Ints]:
    """Return what spans (sorted by begin, may overlap) and runs share.

    (span, run, begin, end) each, by run, then by span.
    """
    reach = np.maximum.accumulate(spans[:, 1])
    first = np.searchsorted(reach, runs[:, 0], "right")
    counts = np.maximum(np.searchsorted(spans[:, 0], runs[:, 1], "left") - first, 0)
    span, run = ramps(first, counts), np.repeat(np.arange(len(runs)), counts)
    begin, end = np.maximum(spans[span, 0], runs[run, 0]), np.minimum(spans[span, 1], runs[run, 1])
    keep = begin < end
    return span[keep], run[keep], begin[keep], end[keep]


def common(first: Runs, second: Runs) -> Runs:
    """Return the granules in both."""
    _, _, begin, end = clipped(first, second)
    return np.stack([begin, end], axis=1)


def window(runs: Runs, start: int, stop: int) -> Runs:
    """Return the granules number start to stop - 1 of those in the runs."""
    sizes, before = runs[:, 1] - runs[:, 0], begins(runs)
    begin = runs[:, 0] + np.clip(start - before, 0, sizes)
    end = runs[:, 0] + np.clip(stop - before, 0, sizes)
    keep = begin < end
    return np.stack([begin[keep], end[keep]], axis=1)


def count(runs: Runs) -> int:
    """Return how many granules runs hold."""
    return int((runs[:, 1] - runs[:, 0]).sum())


def share_reads(
    wanted_by_rank: Sequence[Runs], readable: Sequence[Runs] | None = None
) -> tuple[list[Runs], list[Runs]]:  # fmt: skip
    """For each rank the granules that it reads for itself alone, and those that it reads for others too.

    Each granule that anyone wants is read by one rank, which wants it if one of those can read it. `readable` is what
    each rank can read, by default everything; someone has to be able to read what is wanted.
    """
    edges = np.unique(np.concatenate([runs.reshape(-1) for runs in (*wanted_by_rank, *(readable or ()))]))
    wants = _held(edges, wanted_by_rank)
    reads = wants if readable is None else _readers(wants, _held(edges, readable))
    num_wanting = wants.sum(axis=0)
    pieces = np.stack([edges[:-1], edges[1:]], axis=1) if len(edges) else np.empty((0, 2), np.int64)
    own = wants & reads & (num_wanting == 1)
    alone = [joined_runs(pieces[row]) for row in own]
    load = np.array([count(runs) for runs in alone], np.int64)
    is_shared = (num_wanting > 0) & ~own.any(axis=0)
    num_reading = reads.sum(axis=0)
    shared: list[list[Runs]] = [[] for _ in wanted_by_rank]
    _, group = np.unique(np.packbits(reads, axis=0), axis=1, return_inverse=True)
    group = group.reshape(-1)
    for number in sorted(set(group[is_shared].tolist()), key=lambda number: int(num_reading[group == number][0])):
        members = np.flatnonzero((group == number) & is_shared)
        ranks = np.flatnonzero(reads[:, members[0]])
        runs, at = pieces[members], 0
        for rank, share in zip(ranks.tolist(), levelled(load[ranks], count(runs)).tolist(), strict=True):
            shared[rank].append(window(runs, at, at + share))
            load[rank] += share
            at += share
    none = np.empty((0, 2), np.int64)
    return alone, [joined_runs(np.concatenate([none, *runs])) for runs in shared]


def _held(edges: Ints, runs_of_ranks: Sequence[Runs]) -> Rows:
    """Return, for each rank a row, which of the pieces between edges are in its runs."""
    is_within = np.zeros((len(runs_of_ranks), max(len(edges) - 1, 0)), bool)
    for row, runs in zip(is_within, runs_of_ranks, strict=True):
        changes = np.zeros(len(edges), np.int8)
        changes[np.searchsorted(edges, runs[:, 0])] += 1
        changes[np.searchsorted(edges, runs[:, 1])] -= 1
        row[:] = np.cumsum(changes, dtype=np.int8)[: is_within.shape[1]]
    return is_within


def _readers(wants: Rows, can: Rows) -> Rows:
    """Return which ranks may read each piece: those that want it and can, else those that can."""
    found = wants & can
    is_wanted, by_one = np.any(wants, axis=0), np.any(found, axis=0)
    by_others = np.flatnonzero(is_wanted & ~by_one)
    found[:, by_others] = can[:, by_others]
    assert np.array_equal(np.any(found, axis=0), is_wanted), "someone can read what is wanted"
    return found


def levelled(load: Ints, total: int) -> Ints:
    """Return how much each of several gets of a total, so that the loads end as equal as they can."""
    order = np.argsort(load, kind="stable")
    rising = load[order]
    counts = np.arange(1, len(load) + 1)
    levels = (total + np.cumsum(rising)) // counts
    most = int(np.flatnonzero(levels >= rising)[-1]) + 1  # the first `most` get something
    shares = np.zeros_like(load)
    shares[order[:most]] = levels[most - 1] - rising[:most]
    shares[order[: total - int(shares.sum())]] += 1
    return shares
