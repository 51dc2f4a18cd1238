"""ReadAhead: what the coming steps of a rank read of remote stores, fetched into the cache before they are made.

The order of samples is known, so nothing is guessed: one thread walks through the coming steps, and others fetch the
blocks that they read. Blocks that follow each other are one request, as each costs a server what a MiB or two of
content do. The blocks of steps that are over are let go, a few steps later than the Loader makes the next: so ranks in
step need the same blocks, and none drops what another has yet to read. Those of the others are at most a part of the
cache, which spares them when it makes room. A failure is left to whoever reads the block, who tries again.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress

from datakit.remote.remote_store import Block, RemoteStore
from datakit.store.shard import Int64s
from datakit.stream.blend import Blend
from datakit.stream.making_thread import end_with_program
from datakit.stream.row_pieces import CutRows
from threefold.errors import UserError

NUM_THREADS = 8
AHEAD_PART = 0.8  # of the cache, the rest is for indices and for what a rank that is a step behind needs
MAX_STEPS, MAX_PIECES = 1 << 14, 1 << 19  # that are planned; a piece of a row takes 48 bytes
RUN_BYTES = 12 << 20  # of a request at most; so many each thread holds in memory

Place = tuple[int, int, int]  # a source of the blend, a shard of it and a block of that


class ReadAhead:
    """Owned by a Loader, which says which step it makes; its daemon threads end with `close`, or the program."""

    def __init__(self, blend: Blend, samples_of: Callable[[int], Int64s], begin: int, stride: int) -> None:
        """Begin to read ahead at the step of sample `begin`; from a step to the next are `stride` samples.

        `samples_of(first)` are the samples of the step that begins at sample `first`.
        """
        self._blend, self._samples_of, self._begin, self.stride = blend, samples_of, begin, stride
        self._most_bytes = int(AHEAD_PART * min(cache.max_bytes for cache in blend.caches))
        self._changed = threading.Condition()
        self._now, self._num_over, self._is_closed = 0, 0, False
        self._ahead_bytes = self._num_pieces = 0
        self._needed: dict[Place, tuple[int, Block]] = {}  # with the last step that needs it
        self._steps: deque[tuple[int, list[Place]]] = deque()
        self._rows: dict[int, CutRows] = {}  # of steps that are planned
        self._run_bytes = min(RUN_BYTES, self._most_bytes // 2)
        self._wanted: queue.SimpleQueue[list[Block] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=work, name="datakit-read-ahead", daemon=True)
            for work in (self._plan_steps, *[self._fetch_blocks] * NUM_THREADS)
        ]
        end_with_program(self)
        for thread in self._threads:
            thread.start()

    def number(self, first: int) -> int | None:
        """Return which step begins at a sample, None if none does that is not over."""
        number, rest = divmod(first - self._begin, self.stride)
        return None if rest or number < self._num_over else number

    def begin(self, number: int, num_kept: int) -> None:
        """Say that a step is about to be made, and let go what only steps before it needed, but for the last few."""
        with self._changed:
            self._now, self._num_over = number, max(0, number - num_kept)
            while self._steps and self._steps[0][0] < self._num_over:
                over, places = self._steps.popleft()
                if (rows := self._rows.pop(over, None)) is not None:
                    self._num_pieces -= len(rows.pieces)
                for place in places:
                    last, block = self._needed[place]
                    if last == over:
                        self._let_go(place, block)
            self._changed.notify()

    def rows(self, first: int) -> CutRows | None:
        """Return the rows of the step that begins at a sample, None if it is not planned."""
        number = self.number(first)
        return None if number is None else self._rows.get(number)

    def close(self) -> None:
        """End the threads; a request that is under way ends by itself."""
        with self._changed:
            self._is_closed = True
            for place, (_, block) in list(self._needed.items()):
                self._let_go(place, block)
            self._steps.clear()
            self._rows.clear()
            self._changed.notify()
        for _ in range(NUM_THREADS):
            self._wanted.put(None)

    def wait(self, until_s: float) -> None:
        """Wait for the threads after `close`, up to a time of the monotonic clock."""
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))

    def _let_go(self, place: Place, block: Block) -> None:
        del self._needed[place]
        self._ahead_bytes -= block.size_bytes
        block.store.cache.needed.discard(block.name)

    def _plan_steps(self) -> None:
        number, blocks = 0, dict[Place, Block]()
        while True:
            rows, before, blocks = None, blocks, {}
            with suppress(UserError):  # who makes the step finds it out
                rows = self._blend.cut(self._samples_of(self._begin + number * self.stride).ravel())
                blocks = self._blocks_of(rows, before)
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._has_room(number, blocks))  # noqa: B023
                if self._is_closed:
                    return
                self._steps.append((number, list(blocks)))
                if rows is not None:
                    self._rows[number] = rows
                    self._num_pieces += len(rows.pieces)
                new = [block for place, block in blocks.items() if place not in self._needed]
                for block in new:
                    block.store.cache.needed.add(block.name)
                    self._ahead_bytes += block.size_bytes
                self._needed |= {place: (number, block) for place, block in blocks.items()}
            for run in _runs(new, self._run_bytes):
                self._wanted.put(run)
            number += 1

    def _blocks_of(self, rows: CutRows, known: Mapping[Place, Block]) -> dict[Place, Block]:
        """Return the blocks of remote stores that rows read, sorted; most are `known`, as those of the step before."""
        slots, starts, stops = rows.ranges().T
        found = dict[Place, Block]()
        for slot, (source, shard) in enumerate(rows.shards):
            store = self._blend.stores[source]
            if isinstance(store, RemoteStore):
                inside = slots == slot
                for number in store.blocks(shard, starts[inside], stops[inside]):
                    place = source, shard, number
                    found[place] = known.get(place) or store.block(shard, number)
        return found

    def _has_room(self, number: int, blocks: Mapping[Place, Block]) -> bool:
        """Return whether a step may be planned: the one that is made now always may."""
        if number <= self._now:
            return True
        new_bytes = sum(block.size_bytes for place, block in blocks.items() if place not in self._needed)
        is_near = len(self._steps) < MAX_STEPS and self._num_pieces < MAX_PIECES
        return self._ahead_bytes + new_bytes <= self._most_bytes and is_near

    def _fetch_blocks(self) -> None:
        while (run := self._wanted.get()) is not None:
            if any(block.name in block.store.cache.needed for block in run):  # it may be over by now
                with suppress(UserError):
                    run[0].store.fetch_run(run)


def _runs(blocks: Iterable[Block], most_bytes: int) -> Iterator[list[Block]]:
    """Yield blocks in stretches of a shard, one block or `most_bytes` at most; they are sorted."""
    run: list[Block] = []
    for block in blocks:
        follows = run and (block.store, block.shard, block.number) == (run[-1].store, run[-1].shard, run[-1].number + 1)
        if run and (not follows or sum(each.size_bytes for each in run) + block.size_bytes > most_bytes):
            yield run
            run = []
        run.append(block)
    if run:
        yield run
