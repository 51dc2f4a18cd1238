"""Targets: the memory that a restore fills; host memory in place, that of devices through bounded buffers.

What is for devices is read block by block of the files, each by one lane into a buffer of its own, and goes over while
the same lane reads the next one: none waits for others. A lane is a Python thread that reads with LANE_THREADS native
ones, as Python threads wait for the interpreter. Memory: two buffers of BLOCK_BYTES a lane.
"""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from ckptkit.io.torch_tensors import Transfer, device_addresses, host_addresses, is_on_host
from ckptkit.model.chunk_table import Ints, ramps
from ckptkit.plan.load_plan import LoadPlan
from threefold.closing import Closing

BLOCK_BYTES = 16 << 20  # whole granules, so that no granule is read for two blocks
LANE_THREADS = 2


class Read(Protocol):
    """Makes copies of a plan, each to an address of its own, on so many threads or on as many as it likes."""

    def __call__(self, copies: LoadPlan, addresses: Ints, num_threads: int | None = None, /) -> None:
        """Make them; several threads may call."""


class Targets(Closing):
    """Arrays and tensors, one a wanted chunk of a plan; use it in a `with`. Memory of devices is filled by lanes."""

    def __init__(self, data: Sequence[Any], num_threads: int) -> None:
        self._most_lanes, self._lanes = max(num_threads // LANE_THREADS, 1), list[_Lane]()
        are_here = [is_on_host(each) for each in data]
        self._on_host = np.array(are_here, bool)
        self._addresses = host_addresses(data)
        self._there = device_addresses(data)
        self._devices = [None if is_here else each.device for each, is_here in zip(data, are_here, strict=True)]
        self._away = [each for each, is_here in zip(data, are_here, strict=True) if not is_here]
        self._pool = ThreadPoolExecutor(self._most_lanes, thread_name_prefix="ckptkit-targets")

    def fill(self, copies: LoadPlan, read: Read) -> None:
        """Have `read` make copies of a plan, in the plan's order, and bring what is for devices there."""
        on_host = self._on_host[copies.row]
        here = copies.take(np.flatnonzero(on_host))
        if len(here):
            read(here, self._addresses[here.row] + here.target)
        away = copies.take(np.flatnonzero(~on_host))
        if len(away):
            self._fill_devices(_Batches(away), read)

    def _fill_devices(self, batches: "_Batches", read: Read) -> None:
        num_lanes = min(self._most_lanes, len(batches))
        self._lanes += [_Lane() for _ in range(len(self._lanes), num_lanes)]
        rest, stopped = iter(range(len(batches))), threading.Event()

        def work(lane: _Lane) -> None:
            try:
                for number in rest:  # each goes to one lane
                    if stopped.is_set():
                        return
                    copies, offset, pieces = batches.batch(number)
                    moves = [
                        (self._devices[wanted], int(self._there[wanted]) + first, place, size)
                        for wanted, first, place, size in pieces
                    ]
                    lane.fill(copies, offset, moves, read)
                lane.wait()
            except BaseException:
                stopped.set()
                raise

        for lane in self._lanes[:num_lanes]:
            lane.follow(self._away)
        try:
            for done in [self._pool.submit(work, lane) for lane in self._lanes[:num_lanes]]:
                done.result()
        finally:
            stopped.set()

    def close(self) -> None:
        """Let go of the buffers and end the threads."""
        for done in [self._pool.submit(lane.close) for lane in self._lanes]:
            done.result()
        self._pool.shutdown()


class _Lane:
    """Two buffers of host memory on their way to devices; one is filled while the other is copied. Of one thread."""

    def __init__(self) -> None:
        self._buffers, self._turn = [(np.empty(BLOCK_BYTES, np.uint8), Transfer()) for _ in range(2)], 0

    def follow(self, tensors: Sequence[Any]) -> None:
        """Let what is copied come after the work that the tensors' devices have now, on the caller's streams."""
        for _, transfer in self._buffers:
            transfer.follow(tensors)

    def fill(self, copies: LoadPlan, offset: Ints, moves: Sequence[tuple[Any, int, int, int]], read: Read) -> None:
        """Read copies into a buffer, each to its offset, and begin to move that to the devices."""
        memory, transfer = self._buffers[self._turn]
        self._turn = 1 - self._turn
        transfer.wait()
        read(copies, memory.ctypes.data + offset, LANE_THREADS)
        transfer.send(memory, moves)

    def wait(self) -> None:
        """Block until all copies are made."""
        for _, transfer in self._buffers:
            transfer.wait()

    def close(self) -> None:
        """Let go of the buffers."""
        self.wait()
        for _, transfer in self._buffers:
            transfer.unlock()


class _Batches:
    """Copies, divided at the borders of blocks of their files, in batches that fit a buffer.

    What a batch brings side by side into a tensor is side by side in the buffer too, and one piece: rows of a matrix
    that is cut by columns go over in one copy. All of it is worked out at once, as batches are many.
    """

    def __init__(self, copies: LoadPlan) -> None:
        """Take the copies of a plan; those of a block that share bytes may need several batches."""
        first = copies.source // BLOCK_BYTES
        counts = (copies.source + np.maximum(copies.size, 1) - 1) // BLOCK_BYTES - first + 1
        row, block = np.repeat(np.arange(len(copies)), counts), ramps(first, counts)
        begin = np.maximum(copies.source[row], block * BLOCK_BYTES)
        end = np.minimum((copies.source + copies.size)[row], (block + 1) * BLOCK_BYTES)
        cut = copies.take(row)
        cut = replace(cut, source=begin, target=cut.target + begin - cut.source, size=end - begin)
        order = np.lexsort([cut.source, block, cut.part])
        self._copies, block = cut.take(order), block[order]
        self._edges = list(_edges(self._copies, block))
        batch = np.repeat(np.arange(len(self)), np.diff(self._edges))
        order = np.lexsort([self._copies.target, self._copies.row, batch])
        chunk, target, size = self._copies.row[order], self._copies.target[order], self._copies.size[order]
        place = np.cumsum(size) - size
        place -= place[self._edges[:-1]][batch]  # both orders have a batch's copies at the same places
        self._offset = np.empty_like(place)
        self._offset[order] = place
        is_new = np.append(True, (chunk[1:] != chunk[:-1]) | (target[1:] != target[:-1] + size[:-1]))
        is_new[self._edges[:-1]] = True
        firsts = np.flatnonzero(is_new)
        sizes = np.add.reduceat(size, firsts)
        self._pieces = np.stack([chunk[firsts], target[firsts], place[firsts], sizes], axis=1)
        self._piece_edges = np.searchsorted(firsts, self._edges).tolist()

    def __len__(self) -> int:
        return len(self._edges) - 1

    def batch(self, number: int) -> tuple[LoadPlan, Ints, list[list[int]]]:
        """Return a batch: its copies, the place of each in a buffer, and pieces of the buffer.

        A piece is for a wanted chunk, from one of its bytes on: chunk, byte, place in the buffer, bytes.
        """
        own, pieces = (slice(*edges[number : number + 2]) for edges in (self._edges, self._piece_edges))
        return self._copies.take(own), self._offset[own], self._pieces[pieces].tolist()


def _edges(copies: LoadPlan, block: Ints) -> Iterator[int]:
    """Yield where batches of copies begin, which are sorted by part and block, and the end."""
    is_new = np.append(True, (copies.part[1:] != copies.part[:-1]) | (block[1:] != block[:-1]))
    for start, stop in pairwise(np.append(np.flatnonzero(is_new), len(copies)).tolist()):
        while start < stop:
            yield start
            start += int(np.searchsorted(np.cumsum(copies.size[start:stop]), BLOCK_BYTES, "right"))
    yield len(copies)
