"""Staging: the arena in which a rank's state waits to be written, shared with the writer process.

The arena is a memfd: containers cap /dev/shm at 64 MB, and its pages outlive the trainer for as long as the writer
holds them. It is touched once when it grows and then reused: fresh memory faults in at 1 GB/s, touched memory copies at
7-15 GB/s. Each data file lies in it whole, header first, so that the writer only passes memory on.
"""

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckptkit.chunk import Piece
from ckptkit.format.data_file import DataFile
from ckptkit.io.blocks import copy_many, num_granules
from ckptkit.plan import SavePlan
from ckptkit.tensor import ITEMSIZE, TensorInfo
from ckptkit.torch_tensors import Bytes, Transfer, host_address, is_contiguous, num_bytes
from threefold.errors import UserError

ALIGNMENT = 4096
GROWTH_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class Area:
    """Bytes [offset, offset + size) of the arena."""

    offset: int
    size: int

    def of(self, memory: Bytes) -> Bytes:
        """These bytes, not copied."""
        return memory[self.offset : self.offset + self.size]


@dataclass(frozen=True)
class StagedFile:
    """Where one data file lies, and its part index whose checksums are still zero."""

    data: Area
    index: Area


class Arena:
    """Memory of a memfd; `fd` is handed to the writer, which maps the same pages."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("ckptkit-arena", os.MFD_CLOEXEC)
        self.size = 0
        self.transfer = Transfer()
        self.memory = np.empty(0, np.uint8)

    @property
    def address(self) -> int:
        """Where the memory begins in this process."""
        return int(self.memory.ctypes.data)

    def reserve(self, size: int) -> None:
        """Grow to at least `size` bytes and touch them; what the arena held is lost. OSError where memory is short."""
        if size <= self.size:
            return
        size = -(-size // GROWTH_BYTES) * GROWTH_BYTES
        self.transfer.unlock()
        self.memory = np.empty(0, np.uint8)
        os.posix_fallocate(self.fd, 0, size)
        self.memory = np.frombuffer(mmap.mmap(self.fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE), np.uint8)
        self.size = size

    def put(self, offset: int, data: bytes) -> Area:
        """Copy some bytes in."""
        self.memory[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
        return Area(offset, len(data))

    def close(self) -> None:
        """Let go of the memory; the writer keeps what it maps."""
        self.transfer.unlock()
        self.memory = np.empty(0, np.uint8)
        os.close(self.fd)


def stage(
    arena: Arena, pieces: Sequence[Piece], tensors: Sequence[TensorInfo], plan: SavePlan, extra: bytes = b""
) -> tuple[list[StagedFile], Area]:
    """Copy the pieces into the arena as the files of their plan, and `extra` behind them.

    Returns when all is copied: the caller may change the pieces' memory at once.
    """
    check_memory(pieces, tensors)
    indexes = [_draft(file) for file in plan.files]
    ends = _ends([file.size_bytes for file in plan.files] + [len(index) for index in indexes] + [len(extra)])
    arena.reserve(ends[-1])
    offsets = iter([0, *ends])
    data = [Area(next(offsets), file.size_bytes) for file in plan.files]
    copies = []
    for area, file, rows in zip(data, plan.files, plan.rows, strict=True):
        arena.put(area.offset, file.header)
        at = area.offset + len(file.header)
        for row, size in zip(rows.tolist(), file.chunks.size_bytes.tolist(), strict=True):
            copies.append((pieces[row].data, at, size))
            at += size
    index_areas = [arena.put(next(offsets), index) for index in indexes]
    _copy_in(arena, copies)
    staged = [StagedFile(*areas) for areas in zip(data, index_areas, strict=True)]
    return staged, arena.put(next(offsets), extra)


def prepare(arena: Arena, pieces: Sequence[Piece], plan: SavePlan, extra_bytes: int) -> None:
    """Grow the arena to what `stage` will need for such pieces, touched and page-locked, before it needs it."""
    sizes = [size for file in plan.files for size in (file.size_bytes, len(_draft(file)))]
    arena.reserve(_ends([*sizes, extra_bytes])[-1])
    if any(host_address(piece.data) is None for piece in pieces):
        arena.transfer.lock(arena.memory)


def check_memory(pieces: Sequence[Piece], tensors: Sequence[TensorInfo]) -> None:
    """UserError where a piece's memory is not its elements one after the other."""
    itemsize = {info.name: ITEMSIZE[info.dtype] for info in tensors}
    for piece in pieces:
        if fault := memory_misfit(piece, itemsize[piece.name]):
            raise UserError(f"{piece.name}: {fault}")


def memory_misfit(piece: Piece, itemsize: int) -> str | None:
    """What is wrong with a piece whose memory is not its elements one after the other, None for a sound one."""
    wanted, found = (piece.stop - piece.start) * itemsize, num_bytes(piece.data)
    if found != wanted:
        return f"a piece of {wanted} bytes has memory of {found} bytes"
    return None if is_contiguous(piece.data) else "a piece's memory is not contiguous"


def _draft(file: DataFile) -> bytes:
    """The part index of a file whose checksums are not known yet."""
    return file.index(np.zeros(num_granules(file.size_bytes), np.uint64)).to_bytes()


def _ends(sizes: Sequence[int]) -> list[int]:
    """Where each of several areas, one after the other and aligned, leaves off."""
    ends: list[int] = np.cumsum([-(-size // ALIGNMENT) * ALIGNMENT for size in sizes], dtype=np.int64).tolist()
    return ends


def _copy_in(arena: Arena, copies: Sequence[tuple[Any, int, int]]) -> None:
    """Start the copies from devices, make those from host memory meanwhile, and wait for all."""
    addressed = [(host_address(data), data, at, size) for data, at, size in copies]
    from_device = [(data, at, size) for address, data, at, size in addressed if address is None]
    arena.transfer.start(arena.memory, from_device)
    copy_many([(address, arena.address + at, size) for address, _, at, size in addressed if address is not None])
    arena.transfer.wait()
