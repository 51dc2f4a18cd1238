"""RingReader: the writer's side of the ring: blocks as the trainer stages them, each released once written."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ckptkit.handoff.protocol import SaveOrder
from ckptkit.handoff.ring_signals import RingSignals, readable
from ckptkit.io.blocks import Bytes, Columns
from ckptkit.writer.step import GivenUp
from threefold.errors import StorageError

LOOK_S = 0.5  # how often a wait looks whether the trainer lives
MAX_BLOCKS_AT_ONCE = 32  # between two looks at whether the save is still wanted


class RingReader:
    """Reads the blocks of one save; raises if the trainer dies, hangs for deadline_s or drops the save.

    Of the writer process: the thread that saves uses it.
    """

    def __init__(self, order: SaveOrder, arena: Bytes, signals: RingSignals, trainer: int) -> None:
        self._order, self._arena, self._signals, self._trainer = order, arena, signals, trainer
        self._num_staged = 0
        ring = order.ring
        self._most = max(ring.num_slots // 2, 1) if ring.is_window else MAX_BLOCKS_AT_ONCE

    def check(self) -> None:
        """Raise GivenUp if the trainer gave the save up."""
        if self._signals.stop.is_set:
            raise GivenUp(f"step {self._order.seat.step} was given up")

    def of_file(self, number: int) -> "FileBlocks":
        """Return one file's blocks; with a slot for each block they can be read again."""
        return FileBlocks(self, number)

    def read(self, number: int) -> Iterator[Columns]:
        """Yield one file's bytes as a row of (address, bytes) for each run of blocks, which is released after it."""
        file, ring = self._order.files[number], self._order.ring
        block, left = file.first_block, file.size_bytes
        while left:
            self._wait_for(block)
            to_wrap = ring.num_slots - block % ring.num_slots
            count = min(self._num_staged - block, self._most, to_wrap, -(-left // ring.block_bytes))
            size = min(count * ring.block_bytes, left)
            yield np.array([(self._arena.ctypes.data + ring.at(block), size)], np.uint64)
            self._signals.released.add(count)
            block, left = block + count, left - size

    def _wait_for(self, block: int) -> None:
        """Wait until a block is staged."""
        self.check()
        order, staged = self._order, self._signals.staged
        waits_until = time.monotonic() + order.deadline_s
        while self._num_staged <= block:
            readable([staged, self._signals.stop], LOOK_S)
            self.check()
            is_orphan = os.getppid() != self._trainer  # asked first: what the trainer staged before it died counts
            found = staged.take()
            self._num_staged += found
            if found:
                continue
            done = f"after {self._num_staged} of {order.ring.num_blocks} blocks of step {order.seat.step}"
            if is_orphan:
                raise StorageError(f"writer {order.seat.writer}: the trainer died {done}")
            if time.monotonic() > waits_until:
                raise StorageError(
                    f"writer {order.seat.writer}: nothing came from the trainer for {order.deadline_s:g} s {done}"
                )


@dataclass(frozen=True)
class FileBlocks:
    """The blocks of one file, read again by each iteration."""

    blocks: RingReader
    number: int

    def __iter__(self) -> Iterator[Columns]:
        return self.blocks.read(self.number)
