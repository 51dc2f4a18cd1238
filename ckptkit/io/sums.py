"""Sums of tensors' elements, computed in parts: what certificates are made of.

A tensor's sum is the CRC-64/NVME, register from 0 and not inverted, of its row-major bytes. What a part adds depends on
its elements and their places in the tensor alone, and parts are joined by exclusive or: so a sum does not depend on
cuts. One changed element, or two of other values that change places, always change it. Cost to a writer that checksums
the same bytes: 0.03 to 0.08 CPU-seconds a GB where the CPU multiplies without carry, 0.19 for rows of 1 KiB out of
memory, and 0.6 where the CPU cannot.
"""

import ctypes

import numpy as np

from ckptkit.io.blocks import Buffer, library, span
from ckptkit.model.chunk_table import ChunkTable


class _Chunks(ctypes.Structure):
    """`ck_chunks` of csrc/ckptkit/ckptkit.h."""

    _fields_ = [("num_chunks", ctypes.c_uint64), ("num_dims", ctypes.c_uint64)] + [
        (name, ctypes.c_void_p)
        for name in ("begin_bytes", "tensor", "box_offset", "box_shape", "start", "shape", "itemsize", "sums")
    ]


class ChunkSums:
    """What chunks, one after the other from a byte of a file on, add to the sums of their tensors: `values`, one each.

    The chunks are over tensors whose shapes are known.
    """

    def __init__(self, chunks: ChunkTable, data_offset: int) -> None:
        assert chunks.tensors.shapes is not None, "sums need the tensors' shapes"
        self.values = np.zeros(len(chunks.names), np.uint64)
        boxes = chunks.with_dims(max(chunks.offset.shape[1], 1))
        num_dims = boxes.offset.shape[1]
        begins = data_offset + np.concatenate([[0], np.cumsum(chunks.size_bytes)])
        columns = (
            begins, chunks.tensor, boxes.offset, boxes.shape, chunks.start, chunks.tensors.padded_shapes(num_dims),
            chunks.tensors.itemsize, self.values,
        )  # fmt: skip
        self._columns = [np.ascontiguousarray(column) for column in columns]  # which the addresses below need
        self._chunks = _Chunks(len(chunks), num_dims, *(column.ctypes.data for column in self._columns))

    @property
    def address(self) -> int:
        """Where the library finds the chunks while this object lives."""
        return ctypes.addressof(self._chunks)

    def add(self, data: Buffer, offset_bytes: int, *, carryless: int = -1) -> None:
        """Add the bytes of the file from an offset on; they cut no element. Those outside of all chunks add nothing.

        `carryless` is 0 for portable code, 1 for multiplications without carry, -1 for the best that the CPU offers.
        """
        address, size = span(data)
        self.add_at(address, size, offset_bytes, carryless=carryless)

    def add_at(self, address: int, size_bytes: int, offset_bytes: int, *, carryless: int = -1) -> None:
        """Add the same of memory at an address."""
        library().ck_add_sums(self.address, address, offset_bytes, size_bytes, carryless)
