"""MappedReader: a checkpoint read under the names and shapes of a mapping, as if it had been saved so.

Rows that a tensor gets are parts of their own behind the data files: one row in memory, which is repeated.
"""

import ctypes
from functools import cached_property

import numpy as np

from ckptkit.check.elements import widened
from ckptkit.check.slabs import fill
from ckptkit.io.blocks import Bytes
from ckptkit.loading.reader import CheckpointReader
from ckptkit.model.box import Box
from ckptkit.model.chunk_table import ChunkTable, Ints, TensorColumns, ramps
from ckptkit.model.tensor import ITEMSIZE, TensorInfo
from ckptkit.plan.load_plan import LoadPlan, plan_load
from ckptkit.plan.stored import StoredChunks
from ckptkit.rewrite.mapping import Mapped, Mapper

MEAN_BYTES = 16 << 20  # of a tensor whose mean is made, at once
NUMPY = {"F64": np.float64, "F32": np.float32, "F16": np.float16}


class MappedReader(CheckpointReader):
    """An open checkpoint, which the caller closes, as a mapping makes it; use it in a `with`."""

    def __init__(self, inner: CheckpointReader, mapper: Mapper) -> None:
        super().__init__(inner.storage, inner.root.step, num_threads=inner.num_threads, root=mapper.root)
        self._inner = inner
        self._mapped = [each for each in mapper.tensors if each.info.placement.tied_to is None]
        self._grown = [each for each in self._mapped if each.info.shape != each.source.shape]
        self._num_files = int(inner.stored.part.max(initial=-1)) + 1
        self._rows: dict[str, Bytes] = {}  # the bytes of a new row, by tensor

    @property
    def identity(self) -> bytes:
        """What the values follow from: the source, and what each tensor is made of."""
        made_of = [(each.info.name, each.source.name, each.fill) for each in self._mapped]
        return self._inner.identity + super().identity + repr(made_of).encode()

    @cached_property
    def stored(self) -> StoredChunks:
        """The source's chunks under their new names; those of a layer that is repeated are there as often."""
        inner = self._inner.stored
        tensors = TensorColumns.of(list(self.root.tensors.values()))
        sources = [inner.chunks.tensors.numbers[each.source.name] for each in self._mapped]
        first = np.searchsorted(inner.chunks.tensor, sources, "left")
        counts = np.searchsorted(inner.chunks.tensor, sources, "right") - first
        kept = inner.take(ramps(first, counts))
        numbers = np.array([tensors.numbers[each.info.name] for each in self._mapped], np.int64)
        chunks = ChunkTable(
            tensors, np.repeat(numbers, counts), kept.chunks.offset, kept.chunks.shape, kept.chunks.start,
            kept.chunks.stop,
        )  # fmt: skip
        new = ChunkTable.of([(each.info, *_new_rows(each)) for each in self._grown])
        new = new.renumbered(tensors, np.array([tensors.numbers[name] for name in new.names], np.int64))
        chunks = ChunkTable.concatenate([chunks, new])
        part = np.concatenate([kept.part, self._num_files + np.arange(len(new))])
        offset = np.concatenate([kept.offset, np.zeros(len(new), np.int64)])
        return StoredChunks(chunks, part, offset).take(np.argsort(chunks.tensor, kind="stable"))

    @property
    def bytes_read(self) -> int:
        """Bytes of data files read so far."""
        return self._inner.bytes_read

    def plan(self, wanted: ChunkTable) -> LoadPlan:
        """Return the copies that fill wanted chunks."""
        return plan_load(wanted, self.stored)

    def fetch(self, plan: LoadPlan, addresses: Ints) -> None:
        """Make the copies of a plan, each to an address of its own."""
        stored = np.flatnonzero(plan.part < self._num_files)
        self._inner.fetch(plan.take(stored), addresses[stored])
        for row in np.flatnonzero(plan.part >= self._num_files).tolist():
            each, size = self._grown[int(plan.part[row]) - self._num_files], int(plan.size[row])
            memory = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(int(addresses[row])))
            values = self._row(each)
            memory[:] = np.resize(np.roll(values, -(int(plan.source[row]) % max(len(values), 1))), size)

    def close(self) -> None:
        """Close nothing: the files are the inner reader's."""

    def _row(self, each: Mapped) -> Bytes:
        """Return the bytes of one new row."""
        name, info = each.info.name, each.info
        if name not in self._rows:
            zeros = np.zeros(info.size_bytes // info.shape[0], np.uint8)
            self._rows[name] = zeros if each.fill == "zeros" else self._mean(each.source)
        return self._rows[name]

    def _mean(self, source: TensorInfo) -> Bytes:
        """Return the mean of a tensor's rows, summed in float64."""
        num_rows, width = source.shape[0], source.numel // source.shape[0]
        rows_at_once = max(MEAN_BYTES // max(width * ITEMSIZE[source.dtype], 1), 1)
        total = np.zeros(width)
        buffer = np.empty(min(rows_at_once, num_rows) * width * ITEMSIZE[source.dtype], np.uint8)
        for start in range(0, num_rows, rows_at_once):
            stop = min(start + rows_at_once, num_rows)
            [block] = fill(self._inner, [(source, start * width, stop * width)], buffer)
            total += widened(block, source.dtype).reshape(-1, width).sum(axis=0)
        return narrowed(total / num_rows, source.dtype)


def narrowed(values: np.ndarray, dtype: str) -> Bytes:
    """Return float64 values as the bytes of a float dtype, rounded to the nearest, ties to even."""
    if dtype != "BF16":
        return np.ascontiguousarray(values.astype(NUMPY[dtype])).view(np.uint8)
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16).view(np.uint8)


def _new_rows(each: Mapped) -> tuple[Box, int, int]:
    """Return the box of the rows that the source has not, and the range of all its positions."""
    num_old, rest = each.source.shape[0], each.info.shape[1:]
    box = Box((num_old, *(0 for _ in rest)), (each.info.shape[0] - num_old, *rest))
    return box, 0, box.numel
