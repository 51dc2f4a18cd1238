"""Targets: the memory that a restore fills; host memory in place, that of devices through bounded buffers.

What is for devices is read block by block of the files, each by one thread into a buffer of its own, and goes over
while the same thread reads the next one: no thread waits for others. Memory: two buffers of BLOCK_BYTES a thread.
"""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from ckptkit.io.torch_tensors import Transfer, byte_range, host_addresses, is_on_host
from ckptkit.model.chunk_table import Ints, ramps
from ckptkit.plan.load_plan import LoadPlan
from threefold.closing import Closing

BLOCK_BYTES = 8 << 20  # whole granules, so that no granule is read for two blocks


class Read(Protocol):
    """Makes copies of a plan, each to an address of its own, on so many threads or on as many as it likes."""

    def __call__(self, copies: LoadPlan, addresses: Ints, num_threads: int | None = None, /) -> None:
        """Make them; several threads may call."""


class Targets(Closing):
    """Arrays and tensors, one a wanted chunk of a plan; use it in a `with`. Memory of devices is filled by threads."""

    def __init__(self, data: Sequence[Any], num_threads: int) -> None:
        self._data, self._num_threads = data, num_threads
        self._on_host = np.array([is_on_host(each) for each in data], bool)
        self._addresses = host_addresses(data)
        self._lanes: list[_Lane] = []
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="ckptkit-targets")

    def fill(self, copies: LoadPlan, read: Read) -> None:
        """Have `read` make copies of a plan, in the plan's order, and bring what is for devices there."""
        on_host = self._on_host[copies.wanted]
        here = copies.take(np.flatnonzero(on_host))
        if len(here):
            read(here, self._addresses[here.wanted] + here.target)
        away = copies.take(np.flatnonzero(~on_host))
        if len(away):
            self._fill_devices(list(_batches(away)), read)

    def _fill_devices(self, batches: Sequence[LoadPlan], read: Read) -> None:
        for _ in range(len(self._lanes), min(self._num_threads, len(batches))):
            self._lanes.append(_Lane(self._data))
        rest, stopped = iter(batches), threading.Event()

        def work(lane: _Lane) -> None:
            try:
                for batch in rest:  # each goes to one thread
                    if stopped.is_set():
                        return
                    lane.fill(batch, read)
                lane.wait()
            except BaseException:
                stopped.set()
                raise

        lanes = self._lanes[: len(batches)]
        for lane in lanes:
            lane.follow()
        try:
            for done in [self._pool.submit(work, lane) for lane in lanes]:
                done.result()
        finally:
            stopped.set()

    def close(self) -> None:
        """End the threads and let go of the buffers."""
        self._pool.shutdown()
        for lane in self._lanes:
            lane.close()


class _Lane:
    """Two buffers of host memory on their way to devices; one is filled while the other is copied. Of one thread."""

    def __init__(self, data: Sequence[Any]) -> None:
        self._data, self._turn = data, 0
        self._buffers = [(np.empty(BLOCK_BYTES, np.uint8), Transfer()) for _ in range(2)]

    def follow(self) -> None:
        """Let what is copied come after the work that the devices have now; the caller's streams are asked."""
        for _, transfer in self._buffers:
            transfer.follow([each for each in self._data if not is_on_host(each)])

    def fill(self, copies: LoadPlan, read: Read) -> None:
        """Read the copies of a block into a buffer, and begin to copy it to the devices."""
        memory, transfer = self._buffers[self._turn]
        self._turn = 1 - self._turn
        # what ends up side by side in a tensor is side by side in the buffer, and goes over in one copy
        order = np.lexsort([copies.target, copies.wanted])
        offset = np.empty_like(copies.size)
        offset[order] = np.cumsum(copies.size[order]) - copies.size[order]
        transfer.wait()
        read(copies, memory.ctypes.data + offset, 1)
        wanted, target, size = copies.wanted[order], copies.target[order], copies.size[order]
        begins = np.append(True, (wanted[1:] != wanted[:-1]) | (target[1:] != target[:-1] + size[:-1]))
        first = np.flatnonzero(begins)
        columns = (wanted[first], target[first], offset[order[first]], np.add.reduceat(size, first))
        pieces = zip(*(column.tolist() for column in columns), strict=True)
        moves = [(byte_range(self._data[number], at, size), place, size) for number, at, place, size in pieces]
        transfer.start(memory, moves, to_device=True, follows=True)

    def wait(self) -> None:
        """Block until all copies are made."""
        for _, transfer in self._buffers:
            transfer.wait()

    def close(self) -> None:
        """Let go of the buffers."""
        for _, transfer in self._buffers:
            transfer.wait()
            transfer.unlock()


def _batches(copies: LoadPlan) -> Iterator[LoadPlan]:
    """Yield copies, divided at the borders of blocks of their files, in batches of a block that fit a buffer."""
    first = copies.source // BLOCK_BYTES
    counts = (copies.source + np.maximum(copies.size, 1) - 1) // BLOCK_BYTES - first + 1
    row = np.repeat(np.arange(len(copies)), counts)
    block = ramps(first, counts)
    begin = np.maximum(copies.source[row], block * BLOCK_BYTES)
    end = np.minimum((copies.source + copies.size)[row], (block + 1) * BLOCK_BYTES)
    cut = copies.take(row)
    cut = replace(cut, source=begin, target=cut.target + begin - cut.source, size=end - begin)
    order = np.lexsort([cut.source, block, cut.part])
    cut, block = cut.take(order), block[order]
    is_new = np.append(True, (cut.part[1:] != cut.part[:-1]) | (block[1:] != block[:-1]))
    edges = np.append(np.flatnonzero(is_new), len(cut)).tolist()
    for start, stop in pairwise(edges):
        while start < stop:  # once, unless several wanted chunks share bytes
            middle = start + int(np.searchsorted(np.cumsum(cut.size[start:stop]), BLOCK_BYTES, "right"))
            yield cut.take(slice(start, middle))
            start = middle
