"""Targets: the memory that a restore fills; host memory in place, that of devices through two bounded buffers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ckptkit.io.torch_tensors import Transfer, byte_range, host_addresses, is_on_host
from ckptkit.model.chunk_table import Ints, ramps
from ckptkit.plan.load_plan import LoadPlan
from threefold.closing import Closing

BOUNCE_BYTES = 128 << 20
Read = Callable[[LoadPlan, Ints], None]  # makes copies of a plan, each to an address of its own


class _Buffer:
    """Host memory on its way to devices: the next bytes are read into one while another is copied."""

    def __init__(self) -> None:
        self.memory, self.transfer = np.empty(BOUNCE_BYTES, np.uint8), Transfer()


class Targets(Closing):
    """Arrays and tensors, one a wanted chunk of a plan. Use it in a `with`."""

    def __init__(self, data: Sequence[Any]) -> None:
        self._data = data
        self._on_host = np.array([is_on_host(each) for each in data], bool)
        self._addresses = host_addresses(data)
        self._buffers: list[_Buffer] = []

    def fill(self, copies: LoadPlan, read: Read) -> None:
        """Have `read` make copies of a plan, in the plan's order, and bring what is for devices there."""
        on_host = self._on_host[copies.wanted]
        here = copies.take(np.flatnonzero(on_host))
        if len(here):
            read(here, self._addresses[here.wanted] + here.target)
        for number, batch in enumerate(_batches(copies.take(np.flatnonzero(~on_host)))):
            if number == len(self._buffers) < 2:
                self._buffers.append(_Buffer())
            self._fill_devices(batch, read, self._buffers[number % 2])
        for buffer in self._buffers:
            buffer.transfer.wait()

    def _fill_devices(self, batch: LoadPlan, read: Read, buffer: _Buffer) -> None:
        """Read a batch into a buffer, and begin to copy it to the devices."""
        buffer.transfer.wait()
        # what ends up side by side in a tensor is side by side in the buffer, and goes over in one copy
        order = np.lexsort([batch.target, batch.wanted])
        offset = np.empty_like(batch.size)
        offset[order] = np.cumsum(batch.size[order]) - batch.size[order]
        read(batch, buffer.memory.ctypes.data + offset)
        wanted, target, size = batch.wanted[order], batch.target[order], batch.size[order]
        begins = np.ones(len(order), bool)
        begins[1:] = (wanted[1:] != wanted[:-1]) | (target[1:] != target[:-1] + size[:-1])
        first = np.flatnonzero(begins)
        copies = []
        for row, num_bytes in zip(first.tolist(), np.add.reduceat(size, first).tolist(), strict=True):
            part = byte_range(self._data[wanted[row]], int(target[row]), num_bytes)
            copies.append((part, int(offset[order[row]]), num_bytes))
        buffer.transfer.start(buffer.memory, copies, to_device=True)

    def close(self) -> None:
        """Let go of the buffers."""
        for buffer in self._buffers:
            buffer.transfer.wait()
            buffer.transfer.unlock()


def _batches(copies: LoadPlan) -> Iterator[LoadPlan]:
    """Yield copies in their order, divided so that each batch fits the buffer."""
    counts = -(-copies.size // BOUNCE_BYTES)
    done = ramps(np.zeros_like(counts), counts) * BOUNCE_BYTES
    copies = copies.take(np.repeat(np.arange(len(copies)), counts))
    copies = replace(
        copies,
        source=copies.source + done,
        target=copies.target + done,
        size=np.minimum(copies.size - done, BOUNCE_BYTES),
    )
    ends = np.cumsum(copies.size)
    start = 0
    while start < len(copies):
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + BOUNCE_BYTES, "right"))
        yield copies.take(slice(start, stop))
        start = stop
