"""A read that several ranks make together: each granule is read and verified once, and passed on to all who want it.

Every rank sends which granules it wants. What one rank alone wants it reads straight into place; the rest is read in
rounds, in which each rank reads a window of its share and sends every other rank what that one wants of it, while the
next window is read. Memory: two windows, what is sent of one and what comes in, ROUND_BYTES each of all ranks together
(or a granule a rank, past 64 of them).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from ckptkit.io.blocks import GRANULE_BYTES, Bytes, copy_many, place
from ckptkit.io.double_buffer import ahead
from ckptkit.loading.chunk_source import ChunkSource, reading_threads
from ckptkit.loading.exchange import Exchange, agreed, on_all
from ckptkit.loading.load_sums import LoadSums, fetching
from ckptkit.loading.sharing import Line, Runs, begins, clipped, common, count, share_reads, window
from ckptkit.loading.targets import Targets
from ckptkit.model.chunk_table import Ints
from ckptkit.plan.load_plan import LoadPlan

ROUND_BYTES = 64 << 20


def read_together(
    source: ChunkSource, plan: LoadPlan, targets: Targets, exchange: Exchange, sums: LoadSums | None = None
) -> None:
    """Fill the targets of this rank's plan; every rank of the exchange calls this with a plan and targets of its own.

    What fills them is added to `sums`, if there are any. An error of any rank is raised on all of them.
    """
    assert source.files is not None, "ranks read the files of a step together"
    line = Line([part.data_bytes for part in source.root.parts])
    sent = agreed(exchange, lambda: line.granules(plan).astype("<i8").tobytes())
    wanted: list[Runs] = [np.frombuffer(runs, "<i8").astype(np.int64).reshape(-1, 2) for runs in sent]
    alone, shared = share_reads(wanted, source.files.places.readable(line))
    reading = _Reading(source, plan, targets, sums, exchange, line, wanted)
    on_all(exchange, lambda: reading.read_alone(alone[exchange.rank]))
    width = max(ROUND_BYTES // exchange.size // GRANULE_BYTES, 1)  # granules
    starts = range(0, max(map(count, shared)), width)
    reading.read_rounds([[window(runs, start, start + width) for runs in shared] for start in starts])


class _Reading:
    """One rank's part in a read; `wanted` is what every rank wants."""

    def __init__(
        self, source: ChunkSource, plan: LoadPlan, targets: Targets, sums: LoadSums | None, exchange: Exchange,
        line: Line, wanted_by_rank: list[Runs],
    ) -> None:  # fmt: skip
        self._source, self._plan, self._targets, self._sums = source, plan, targets, sums
        self._exchange, self._line, self._wanted = exchange, line, wanted_by_rank
        self._spans = line.spans(plan)

    def read_alone(self, runs: Runs) -> None:
        """Read what no other rank wants."""
        row, _, begin, end = clipped(self._spans, self._line.bytes_of(runs))
        passed = begin - self._spans[row, 0]
        cut = self._plan.take(row)
        copies = replace(cut, source=cut.source + passed, target=cut.target + passed, size=end - begin)
        self._targets.fill(copies, fetching(self._source, self._sums))

    def read_rounds(self, rounds: list[list[Runs]]) -> None:
        """Make rounds, each of a window for each rank; the next window is read beside the exchange of this one."""
        own = [windows[self._exchange.rank] for windows in rounds]
        most = max((count(runs) for runs in own), default=0) * GRANULE_BYTES
        buffers = [np.empty(most, np.uint8) for _ in rounds[:2]]  # nobody needs a round's once the next one begins
        with reading_threads(1, self._source) as pool:
            reads = ahead(partial(self._read_window, own, buffers), range(len(rounds)), pool)
            for windows in rounds:
                self._share(windows, on_all(self._exchange, lambda: next(reads)))

    def _share(self, windows: list[Runs], memory: Bytes) -> None:
        """Give the others what they want of one's own window, and take what one wants of theirs."""
        own = self._exchange.rank
        give = [self._packed(memory, windows[own], runs) for runs in self._wanted]
        kept, give[own] = give[own], memory[:0]
        received = self._exchange.all_to_all([each.data for each in give])
        arrived = [np.frombuffer(buffer, np.uint8) for buffer in received]
        arrived[own] = kept
        runs = [self._line.bytes_of(common(window, self._wanted[own])) for window in windows]
        on_all(self._exchange, lambda: self._place(runs, arrived))

    def _read_window(self, windows: Sequence[Runs], buffers: Sequence[Bytes], number: int) -> Bytes:
        """Return the bytes of a window's runs of granules, verified, at the begin of its one of two buffers."""
        memory = buffers[number % 2]
        reads, offset = self._line.reads(windows[number])
        self._source.fetch(reads, memory.ctypes.data + offset)
        return memory[: int(reads.size.sum())]

    def _packed(self, memory: Bytes, present: Runs, asked: Runs) -> Bytes:
        """Return what is wanted of the granules in memory, run after run; not copied if it is there like that."""
        spans = self._line.bytes_of(present)
        run, _, begin, end = clipped(spans, self._line.bytes_of(asked))
        offset, size = begins(spans)[run] + begin - spans[run, 0], end - begin
        if not len(run):
            return memory[:0]
        if (offset[1:] == offset[:-1] + size[:-1]).all():
            return memory[offset[0] : offset[-1] + size[-1]]
        packed = np.empty(int(size.sum()), np.uint8)
        at = np.cumsum(size) - size
        copy_many(np.stack([memory.ctypes.data + offset, packed.ctypes.data + at, size], axis=1))
        return packed

    def _place(self, runs_of_ranks: list[Runs], arrived: list[Bytes]) -> None:
        """Copy what came in to where it is wanted, and add it to the sums."""
        for each, data in zip(runs_of_ranks, arrived, strict=True):
            assert len(data) == (each[:, 1] - each[:, 0]).sum(), "what was sent is what is wanted"
        runs, begun = np.concatenate(runs_of_ranks), np.concatenate([begins(each) for each in runs_of_ranks])
        sender = np.repeat(np.arange(len(arrived)), [len(each) for each in runs_of_ranks])
        row, run, begin, end = clipped(self._spans, runs)
        cut = self._plan.take(row)
        target = cut.target + begin - self._spans[row, 0]
        # the "files" of these copies are what came in from each rank
        copies = LoadPlan(sender[run], begun[run] + begin - runs[run, 0], cut.row, target, end - begin)
        self._targets.fill(copies, partial(self._copy, arrived))

    def _copy(self, arrived: list[Bytes], copies: LoadPlan, addresses: Ints, num_threads: int | None = None) -> None:
        """Make copies of what came in."""
        rows = np.stack([copies.source, copies.size, addresses], axis=1)
        sums = None if self._sums is None else self._sums.places(copies)
        edges = np.searchsorted(copies.part, np.arange(len(arrived) + 1)).tolist()
        for data, own in zip(arrived, map(slice, edges, edges[1:]), strict=True):
            place(data, 0, rows[own], None, sums and sums.take(own))
