"""ReadAhead: what the coming steps of a rank read of remote stores, fetched into the cache before they are made.

The order of samples is known, so nothing is guessed: one thread walks through the coming steps, and others fetch the
blocks that they read. Blocks that follow each other are one request, as each costs a server what a MiB or two of
content do: so steps are planned together, up to what one request fetches, and stretches fetched whole. Shards that are
read later are opened meanwhile, each of which takes some requests one after the other.

The blocks of steps that are over are let go, a few steps later than the Loader makes the next: so ranks in step need
the same blocks, and none drops what another has yet to read. Those of the others are at most a part of the cache, which
spares them when it makes room. A failure is left to whoever reads the block, who tries again.
"""

import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby, pairwise
from typing import NamedTuple

from datakit.batches.row_pieces import CutRows
from datakit.format.shard import Int64s
from datakit.loading.fetch_threads import FetchThreads
from datakit.loading.making_thread import end_with_program, in_background
from datakit.order.batch_sizes import BatchSizes
from datakit.order.blend import Blend
from datakit.shards.cached_shards import Block, CachedShards
from threefold.errors import UserError

NUM_THREADS = 8  # and requests at a time; fewer once half of what may be read ahead is there, as they make steps late
LEAST_AT_ONCE = 2
MAX_STEPS, MAX_PIECES = 1 << 14, 1 << 19  # that are planned; a piece of a row takes 48 bytes
RUN_BYTES = 12 << 20  # of a request at most; so many each thread holds in memory
MAX_TOGETHER = 64  # steps that are planned together
MAPPED_STEPS = 2  # blocks are mapped so many steps before the first that reads them is made
OPENED_BYTES, OPENED_STEPS = 64 << 20, 256  # shards are opened before so much else is read, or so many steps

Place = tuple[int, int, bool, int]  # a source of the blend, a shard of it, and a stretch of that or a block of it


class _Part(NamedTuple):
    """What steps read of a remote store: a block, or all of a stretch."""

    blocks: Sequence[Block]
    size_bytes: int


class _Step(NamedTuple):
    """A step that is planned: its rows, None if they cannot be cut, and the parts of remote stores that it reads."""

    number: int
    rows: CutRows | None
    parts: Mapping[Place, _Part]


class ReadAhead:
    """Owned by a Loader, which says which step it makes; its daemon threads end with `close`, or the program."""

    def __init__(
        self, blend: Blend, samples_of: Callable[[int], Int64s], begin: int, sizes: BatchSizes, every: int = 1, *,
        max_steps: int = MAX_STEPS, max_together: int = MAX_TOGETHER,
    ) -> None:  # fmt: skip
        """Begin to read ahead at the step of sample `begin`; steps are of such sizes, and `every` so many is read.

        `samples_of(first)` are the samples of the step that begins at sample `first`. At most `max_steps` are planned,
        `max_together` of them at once.
        """
        self._blend, self._samples_of, self._begin, self._sizes, self.every = blend, samples_of, begin, sizes, every
        self._caches, self._max_steps, self._max_together = blend.caches, max_steps, max_together
        self._changed = threading.Condition()
        self._awaited: Callable[[], bool] = lambda: False  # by the thread that plans
        self._now, self._num_over, self._is_closed = 0, 0, False
        self._ahead_bytes = self._num_pieces = 0
        self._needed: dict[Place, tuple[int, _Part]] = {}  # with the last step that needs it
        self._num_needing = Counter[Block]()  # parts that are needed and have it: a document may be of two stretches
        self._steps: deque[tuple[int, list[Place]]] = deque()
        self._rows: dict[int, CutRows] = {}  # of steps that are planned
        self._to_map: deque[tuple[int, list[Block]]] = deque()  # of steps that are the first to need them
        self._to_unmap = list[Block]()
        self._run_bytes = min(RUN_BYTES, self._most_bytes // 2)
        self._open: set[tuple[int, int]] = set()  # sources with shards of them
        self._to_fetch = deque[tuple[int, list[Block]]]()  # with the bytes that were admitted before
        self._admitted_bytes = self._num_fetching = 0
        self._threads = FetchThreads(NUM_THREADS)
        self._planner = threading.Thread(target=self._plan_steps, name="datakit-read-ahead", daemon=True)
        end_with_program(self)
        self._planner.start()

    @property
    def _most_bytes(self) -> int:
        """Return how much may be read ahead; whole files that are opened leave less."""
        return max(1, min(cache.folder.ahead_bytes for cache in self._caches))

    def number(self, first: int) -> int | None:
        """Return which step begins at a sample, None if none does that is not over."""
        number, rest = divmod(self._sizes.steps_before(self._begin, first), self.every)
        return None if rest or number < self._num_over or self._first(number) != first else number

    def _first(self, number: int) -> int:
        """Return the sample at which a step begins."""
        return self._sizes.samples_after(self._begin, number * self.every)

    def begin(self, number: int, num_kept: int) -> None:
        """Say that a step is about to be made, and let go what only steps before it needed, but for the last few."""
        with self._changed:
            self._now, self._num_over = number, max(0, number - num_kept)
            while self._steps and self._steps[0][0] < self._num_over:
                over, places = self._steps.popleft()
                if (rows := self._rows.pop(over, None)) is not None:
                    self._num_pieces -= len(rows.pieces)
                for place in places:
                    last, part = self._needed[place]
                    if last == over:
                        self._let_go(place, part)
            self._fetch_more()
            self._let_plan()

    def rows(self, first: int) -> CutRows | None:
        """Return the rows of the step that begins at a sample, None if it is not planned."""
        number = self.number(first)
        return None if number is None else self._rows.get(number)

    def close(self) -> None:
        """End the threads; a request that is under way ends by itself."""
        with self._changed:
            self._is_closed = True
            for place, (_, part) in list(self._needed.items()):
                self._let_go(place, part)
            self._steps.clear()
            self._rows.clear()
            self._to_fetch.clear()
            self._changed.notify()
        self._threads.close()

    def wait(self, until_s: float) -> None:
        """Wait for the threads after `close`, up to a time of the monotonic clock."""
        self._planner.join(max(0.0, until_s - time.monotonic()))
        self._threads.wait(until_s)

    def _let_go(self, place: Place, part: _Part) -> None:
        del self._needed[place]
        _, _, is_stretch, _ = place
        for block in part.blocks:
            self._num_needing[block] -= 1
            if not self._num_needing[block]:
                del self._num_needing[block]
                self._ahead_bytes -= block.size_bytes
                block.shards.cache.needed.discard(block.name)
                if is_stretch:  # others were not mapped ahead, and nothing would take them off the list
                    self._to_unmap.append(block)

    def _plan_steps(self) -> None:
        in_background()
        together, new, parts = list[_Step](), dict[Place, _Part](), dict[Place, _Part]()
        for number, rows in enumerate(self._coming_rows()):
            shards, before, parts = self._remote_shards(rows), parts, {}
            if not shards <= self._open:
                self._admit(together)
                together, new = [], {}
            if not self._wait_for(lambda: shards <= self._open):  # noqa: B023
                return
            with suppress(UserError):  # who makes the step finds it out
                parts = self._parts_of(rows, before) if rows else {}
            of_step = {place: part for place, part in parts.items() if place not in self._needed}
            is_full = sum(part.size_bytes for part in (new | of_step).values()) > self._run_bytes
            # few of the first steps, which are awaited
            if is_full or len(together) >= min(self._max_together, number // 2):
                self._admit(together)
                together, new = [], {}
            together.append(_Step(number, rows, parts))
            new |= of_step

    def _coming_rows(self) -> Iterator[CutRows | None]:
        """Yield the rows of step after step, None if they cannot be cut, while shards of later ones are being opened.

        These are none until the first step, which is awaited, is planned.
        """
        cut, ahead_bytes, asked = deque[tuple[CutRows | None, int]](), 0, set[tuple[int, int]]()
        most_bytes, num_yielded = min(OPENED_BYTES, self._most_bytes), 0
        for first, after in pairwise(map(self._first, itertools.count())):
            samples, rows, num_bytes = self._samples_of(first).ravel(), None, most_bytes
            with suppress(UserError):
                rows = self._blend.cut(samples)
                num_bytes = rows.num_bytes * (after - first) // len(samples)  # with those of other ranks
            for shard in self._remote_shards(rows) - asked:
                asked.add(shard)
                self._threads.want(partial(self._open_shard, *shard))
            cut.append((rows, num_bytes))
            ahead_bytes += num_bytes
            while cut and (ahead_bytes >= most_bytes or len(cut) > OPENED_STEPS or num_yielded < 2):
                rows, num_bytes = cut.popleft()
                ahead_bytes, num_yielded = ahead_bytes - num_bytes, num_yielded + 1
                yield rows

    def _cached(self, source: int) -> CachedShards | None:
        return self._blend.stores[source].shards.cached

    def _remote_shards(self, rows: CutRows | None) -> set[tuple[int, int]]:
        if rows is None:
            return set()
        return {place for place in rows.shards if self._cached(place[0])}

    def _admit(self, steps: Sequence[_Step]) -> None:
        """Wait for room for what steps read, and let it be fetched."""
        if not steps:
            return
        parts = {place: part for step in steps for place, part in step.parts.items()}
        if not self._wait_for(lambda: self._has_room(steps[0].number, parts)):
            return
        new = dict[tuple[int, int, int], Block]()
        with self._changed:
            for step in steps:
                self._steps.append((step.number, list(step.parts)))
                if step.rows is not None:
                    self._rows[step.number] = step.rows
                    self._num_pieces += len(step.rows.pieces)
                to_map = list[Block]()
                for place, part in step.parts.items():
                    source, shard, is_stretch, _ = place
                    if place not in self._needed:
                        first = [block for block in part.blocks if not self._num_needing[block]]
                        new |= {(source, shard, block.number): block for block in first}
                        self._num_needing.update(part.blocks)
                        to_map += first if is_stretch else ()  # of other blocks little is read
                    self._needed[place] = step.number, part
                if to_map:
                    self._to_map.append((step.number, to_map))
            for run in _runs([new[place] for place in sorted(new)], self._run_bytes):
                self._to_fetch.append((self._admitted_bytes, run))
                for block in run:
                    block.shards.cache.needed.add(block.name)
                    self._ahead_bytes += block.size_bytes
                    self._admitted_bytes += block.size_bytes
            self._fetch_more()

    def _parts_of(self, rows: CutRows, known: Mapping[Place, _Part]) -> dict[Place, _Part]:
        """Return the parts of remote stores that rows read; most are `known`, as those of the step before.

        They are stretches, which later steps read the rest of, if the cache has room for as much again; else blocks.
        """
        slots, starts, stops = rows.ranges().T
        parts = dict[Place, _Part]()
        for in_stretches in (True, False):
            parts.clear()
            for slot, (source, shard) in enumerate(rows.shards):
                shards, inside = self._cached(source), slots == slot
                if shards is None:
                    continue
                is_stretch = in_stretches and shards.stretch_tokens > 0
                numbers = (
                    shards.stretches(shard, starts[inside])
                    if is_stretch
                    else shards.blocks(shard, starts[inside], stops[inside])
                )
                for number in numbers:
                    place = source, shard, is_stretch, number
                    parts[place] = known.get(place) or _part(shards, shard, is_stretch, number)
            if sum(one.size_bytes for one in parts.values()) <= self._most_bytes // 2:
                break
        return parts

    def _wait_for(self, condition: Callable[[], bool]) -> bool:
        """Wait for a condition, as the thread that plans, and map blocks meanwhile; False if it is to end."""
        while True:
            with self._changed:
                self._awaited = condition
                self._changed.wait_for(lambda: self._is_closed or self._must_map() or self._to_unmap or condition())
                if self._is_closed:
                    return False
                if not self._must_map() and not self._to_unmap:
                    return True
                blocks = self._to_map.popleft()[1] if self._must_map() else []
                over, self._to_unmap = self._to_unmap, []
            for block in over:
                block.shards.unmap(block)
            for shards, of_shards in groupby(blocks, lambda block: block.shards):
                with suppress(UserError):
                    shards.map_blocks(of_shards)

    def _must_map(self) -> bool:
        """Return whether there are blocks to map for a step that is made soon."""
        return bool(self._to_map) and self._to_map[0][0] <= self._now + MAPPED_STEPS

    def _let_plan(self) -> None:
        """Wake the thread that plans if what it waits for is so; in vain that would cost others the interpreter."""
        if self._must_map() or self._to_unmap or self._awaited():
            self._changed.notify()

    def _has_room(self, number: int, parts: Mapping[Place, _Part]) -> bool:
        """Return whether steps from a number on may be planned: the one that is made now always may."""
        if number <= self._now:
            return True
        new_bytes = sum(part.size_bytes for place, part in parts.items() if place not in self._needed)
        is_near = len(self._steps) < self._max_steps and self._num_pieces < MAX_PIECES
        return is_near and self._ahead_bytes + new_bytes <= self._most_bytes

    def _fetch_more(self) -> None:
        """Let as many requests be made at a time as become what comes next: fewer, if it is read much later."""
        over_bytes = self._admitted_bytes - self._ahead_bytes
        while self._to_fetch:
            num_bytes, run = self._to_fetch[0]
            room = 1 - (num_bytes - over_bytes) / self._most_bytes
            if self._num_fetching >= max(LEAST_AT_ONCE, min(1, 2 * room) * NUM_THREADS):
                break
            self._to_fetch.popleft()
            self._num_fetching += 1
            self._threads.want(partial(self._fetch, run))

    def _fetch(self, run: list[Block]) -> None:
        if any(block.name in block.shards.cache.needed for block in run):  # it may be over by now
            with suppress(UserError):
                run[0].shards.fetch_run(run)
        with self._changed:
            self._num_fetching -= 1
            self._fetch_more()

    def _open_shard(self, source: int, shard: int) -> None:
        shards = self._cached(source)
        assert shards is not None, "others are open"
        with suppress(UserError):
            shards.tokens_of(shard)
        with self._changed:
            self._open.add((source, shard))
            self._let_plan()


def _part(shards: CachedShards, shard: int, is_stretch: bool, number: int) -> _Part:
    blocks = shards.blocks_of_stretch(shard, number) if is_stretch else [shards.block(shard, number)]
    return _Part(blocks, sum(block.size_bytes for block in blocks))


def _runs(blocks: Iterable[Block], most_bytes: int) -> Iterator[list[Block]]:
    """Yield blocks in stretches of a shard, one block or `most_bytes` at most; they are sorted."""
    run: list[Block] = []
    for block in blocks:
        follows = run and (block.shards, block.shard, block.number) == (
            run[-1].shards,
            run[-1].shard,
            run[-1].number + 1,
        )
        if run and (not follows or sum(each.size_bytes for each in run) + block.size_bytes > most_bytes):
            yield run
            run = []
        run.append(block)
    if run:
        yield run
