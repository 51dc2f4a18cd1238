"""Staging: the arena through which a rank's state goes to the writer process, and the copies into it.

The arena is a memfd: containers cap /dev/shm at 64 MB, and its pages outlive the trainer for as long as the writer
holds them. It is touched once when it grows and then reused: fresh memory faults in at 1 GB/s, touched memory copies at
7-15 GB/s. Behind what stays the same from save to save is a ring of blocks: as many as the state has, so that the
copy waits for nothing, or a window of them, filled while the writer empties it.

A SaveTemplate is what stays the same while a rank's pieces keep their names and boxes, made once. A later save only
compares: O(pieces), 1 ms for 20,000 pieces whose boxes and tensor table are the same objects.
"""

import mmap
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ckptkit.format.root import Root
from ckptkit.handoff.block_layout import BlockLayout
from ckptkit.handoff.protocol import Area, Ring, StagedFile
from ckptkit.handoff.ring_signals import RingSignals
from ckptkit.io.blocks import Bytes, copy_many
from ckptkit.io.torch_tensors import Transfer, byte_range, host_addresses
from ckptkit.model.chunk_table import Ints
from ckptkit.model.layout import ParallelLayout
from ckptkit.model.tensor import ITEMSIZE, Piece, TensorInfo, tensor_table
from ckptkit.plan.save_plan import SavePlan, plan_save

ALIGNMENT = 4096
GROWTH_BYTES = 2 << 20
MIN_SLOTS = 2  # one to fill while the other is written


class SaveTemplate:
    """The plan, the layout of blocks, and the bytes that the writer needs beside them.

    `sizes` and `dtypes` are those of the pieces, `indexes` the part indexes without checksums, `headers` the beginnings
    of the data files, `draft` a root of which only the tensors count (b"" on ranks that do not commit).
    """

    def __init__(self, pieces: Sequence[Piece], tensors: Sequence[TensorInfo], *, commits: bool) -> None:
        table = tensor_table(tensors)
        draft = Root(0, "draft", ParallelLayout(), 0, table, (), {})
        draft.check()
        self._places, self._tensors = _places(pieces), list(tensors)
        self.plan: SavePlan = plan_save(pieces, tensors)
        self.sizes = piece_sizes(pieces, tensors)
        self.block_layout = BlockLayout.of(self.plan, len(pieces))
        self.headers: list[Bytes] = [np.frombuffer(file.header, np.uint8) for file in self.plan.files]
        self.indexes = [file.draft_index().to_bytes() for file in self.plan.files]
        self.dtypes = [table[piece.name].dtype for piece in pieces]
        self.draft = draft.to_bytes() if commits else b""

    def fits(self, pieces: Sequence[Piece], tensors: Sequence[TensorInfo]) -> bool:
        """Return whether it is that of these pieces in a checkpoint of this table."""
        return _places(pieces) == self._places and list(tensors) == self._tensors


def _places(pieces: Sequence[Piece]) -> list[list[object]]:
    """Return what of each piece is where, column by column: lists of the same objects compare fastest."""
    return [[p.name for p in pieces], [p.start for p in pieces], [p.stop for p in pieces], [p.box for p in pieces]]


def piece_sizes(pieces: Sequence[Piece], tensors: Sequence[TensorInfo]) -> list[int]:
    """Return the bytes of each piece."""
    itemsize = {info.name: ITEMSIZE[info.dtype] for info in tensors}
    return [(piece.stop - piece.start) * itemsize[piece.name] for piece in pieces]


def is_left_alone() -> bool:
    """Return that what was copied is sound, as its owner leaves it alone meanwhile."""
    return True


class Arena:
    """Memory of a memfd, made by the trainer's process; the writer gets `fd` and maps the same pages."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("ckptkit-arena", os.MFD_CLOEXEC)
        self.signals = RingSignals()
        self.size = 0
        self.transfer = Transfer()
        self.memory = np.empty(0, np.uint8)
        self._held: tuple[SaveTemplate, int, list[StagedFile], Area, Ring] | None = None

    def hold(self, template: SaveTemplate, window_bytes: int) -> tuple[list[StagedFile], Area, Ring]:
        """Make room for saves of a template, put there what the writer needs of it, and return where that is.

        That is the files, the root's draft and the ring of blocks, of window_bytes if that is not 0. Raise OSError if
        memory is short.
        """
        if self._held is None or self._held[:2] != (template, window_bytes):
            self._held = None
            fixed = [*template.indexes, template.draft]
            ends = _ends([len(data) for data in fixed])
            layout = template.block_layout
            num_slots = max(window_bytes // layout.block_bytes, MIN_SLOTS) if window_bytes else layout.num_blocks
            ring = Ring(ends[-1], layout.block_bytes, min(num_slots, layout.num_blocks), layout.num_blocks)
            last_file = template.plan.files[-1].size_bytes % layout.block_bytes  # only its slot is not full
            unused = 0 if ring.is_window or not last_file else layout.block_bytes - last_file
            self.reserve(ring.offset + ring.num_slots * ring.block_bytes - unused)
            areas = [self.put(at, data) for at, data in zip([0, *ends[:-1]], fixed, strict=True)]
            files = [
                StagedFile(file.size_bytes, first, area)
                for file, first, area in zip(template.plan.files, layout.first_blocks, areas[:-1], strict=False)
            ]
            self._held = (template, window_bytes, files, areas[-1], ring)
        return self._held[2:]

    def reserve(self, size: int) -> None:
        """Grow to at least `size` bytes and touch them; its content is lost. Raise OSError if memory is short."""
        if size <= self.size:
            return
        size = -(-size // GROWTH_BYTES) * GROWTH_BYTES
        self.transfer.unlock()
        self.memory, self.size = np.empty(0, np.uint8), 0  # also where the next lines fail
        os.posix_fallocate(self.fd, 0, size)
        self.memory = np.frombuffer(mmap.mmap(self.fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE), np.uint8)
        self.size = size

    def put(self, offset: int, data: bytes) -> Area:
        """Copy some bytes in, and return where they are."""
        self.memory[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
        return Area(offset, len(data))

    def close(self) -> None:
        """Let go of the memory; the writer keeps what it maps."""
        self.transfer.unlock()
        self.memory = np.empty(0, np.uint8)
        self.signals.close()
        os.close(self.fd)


class BlockCopies:
    """The copies of what a layout puts into blocks, out of host memory and of devices; the sources are kept."""

    def __init__(self, layout: BlockLayout, sources: Sequence[Any]) -> None:
        self.layout, self._sources = layout, sources
        self.addresses = host_addresses(sources)
        self._on_device = self.addresses[layout.source] == 0
        self.are_from_host = not self._on_device.any()

    def follow(self, transfer: Transfer) -> None:
        """Let copies from devices begin behind the work that the caller's current streams have now."""
        on_device = set(self.layout.source[self._on_device].tolist())  # numpy.unique would stall the first by an import
        transfer.follow([self._sources[number] for number in on_device])

    def copy(self, part: slice, at: Ints, memory: Bytes, transfer: Transfer) -> None:
        """Copy segments to places in some memory: start those from devices, make the others meanwhile, wait for all."""
        on_device = self._on_device[part]
        source, offset, size = self.layout.source[part], self.layout.offset[part], self.layout.size[part]
        from_device = [
            (byte_range(self._sources[number], start, length), place, length)
            for number, start, length, place in zip(
                *(column[on_device].tolist() for column in (source, offset, size, at)), strict=True
            )
        ]
        transfer.start(memory, from_device, follows=True)
        address, target = self.addresses[source] + offset, memory.ctypes.data + at
        copy_many(np.stack([address, target, size], axis=1)[~on_device])
        transfer.wait()


class Staging:
    """The copies of one save into the arena's ring, block after block, as the writer makes room.

    Of the trainer's process: `run` copies on the caller's thread, `start` on one of its own.

    The sources are kept until all is copied: a tensor that is replaced meanwhile is saved as it was. Device copies
    begin behind the work that the caller's current streams have when this is made.
    """

    def __init__(self, arena: Arena, layout: BlockLayout, ring: Ring, sources: Sequence[Any]) -> None:
        self._arena, self._layout, self._ring = arena, layout, ring
        self._copies = BlockCopies(layout, sources)
        self._copies.follow(arena.transfer)
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def warm_up(self) -> None:
        """Fill the ring once, which the writer never hears of: the first copies from a device are slower."""
        self._copy(self._layout.between(0, self._ring.num_slots))

    def run(self, room: Callable[[], int], is_sound: Callable[[], bool] = is_left_alone) -> None:
        """Copy all; `room` waits until the writer released blocks and returns their number, 0 if it never will.

        The last blocks are handed over if all that was copied `is_sound`.
        """
        ring, num_staged, num_slots = self._ring, 0, self._ring.num_slots
        while num_staged < ring.num_blocks:
            stop = min(num_slots, ring.num_blocks)
            if stop == num_staged:
                released = room()
                if not released:
                    return
                num_slots += released
                continue
            self._copy(self._layout.between(num_staged, stop))
            if stop == ring.num_blocks and not is_sound():
                return
            self._arena.signals.staged.add(stop - num_staged)
            num_staged = stop

    def start(self, room: Callable[[], int], is_sound: Callable[[], bool] = is_left_alone) -> None:
        """Copy all on a thread; `join` waits for it."""

        def work() -> None:
            try:
                self.run(room, is_sound)
            except BaseException as failure:  # raised by `join`, whatever it is
                self._failure = failure

        self._thread = threading.Thread(target=work, name="staging", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether its thread still copies."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the thread."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def join(self) -> None:
        """Wait for the thread, and raise what it failed of."""
        self.wait()
        if self._failure is not None:
            raise self._failure

    def _copy(self, part: slice) -> None:
        at = self._ring.at(self._layout.block[part]) + self._layout.at[part]
        self._copies.copy(part, at, self._arena.memory, self._arena.transfer)


def _ends(sizes: Sequence[int]) -> list[int]:
    """Return where each of several areas, one after the other and aligned, ends."""
    ends: list[int] = np.cumsum([-(-size // ALIGNMENT) * ALIGNMENT for size in sizes], dtype=np.int64).tolist()
    return ends
