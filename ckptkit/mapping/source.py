"""MappedSource: a checkpoint read under the names and shapes of a mapping, as if it had been saved so.

Rows that a tensor gets are parts of their own behind the data files: one row in memory, which is repeated.
"""

import ctypes
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import numpy as np

from ckptkit.check.elements import narrowed, widened
from ckptkit.check.slabs import fill
from ckptkit.io.blocks import Bytes, Columns, SumPlaces
from ckptkit.loading.chunk_source import ChunkSource, attempt_made_of, planned, read_chunks
from ckptkit.loading.step_files import StepFiles
from ckptkit.mapping.mapped import Mapped, moved, num_rows
from ckptkit.mapping.mapper import Mapper
from ckptkit.mapping.sums import MappedSums
from ckptkit.model.box import Box
from ckptkit.model.chunk_table import ChunkTable, Ints, TensorColumns
from ckptkit.model.layout import ParallelLayout
from ckptkit.model.tensor import ITEMSIZE
from ckptkit.plan.load_plan import LoadPlan
from ckptkit.plan.stored import StoredChunks
from threefold.closing import Closing

MEAN_BYTES = 16 << 20  # of a tensor whose mean is made, at once


class MappedSource(Closing):
    """An open source, which the caller closes, as a mapping makes it: a ChunkSource too; use it in a `with`."""

    def __init__(self, inner: ChunkSource, mapper: Mapper) -> None:
        self.root, self.url, self._inner = mapper.root, inner.url, inner
        self._mapped = [each for each in mapper.tensors if each.info.placement.tied_to is None]
        self._grown = [each for each in self._mapped if each.num_rows != num_rows(each.info)]
        self._num_files = int(inner.stored.part.max(initial=-1)) + 1
        self._rows: dict[str, Bytes] = {}  # the bytes of a new row, by tensor
        self._sums = MappedSums(inner.root, inner.url, self._mapped)

    @property
    def files(self) -> StepFiles | None:
        """The files of the source."""
        return self._inner.files

    def attempt_for(self, layout: ParallelLayout) -> str:
        """Return the attempt that writes this for a layout; it follows from the source and what tensors are made of."""
        made_of = [(each.info.name, each.made_of, each.fill) for each in self._mapped]
        return attempt_made_of(self._inner.root.to_bytes() + self.root.to_bytes() + repr(made_of).encode(), layout)

    @cached_property
    def stored(self) -> StoredChunks:
        """The source's chunks under their new names and in their new rows, those of repeated layers as often."""
        tensors = TensorColumns.of(list(self.root.tensors.values()))
        ranges = [
            (tensors.numbers[each.info.name], at, part)
            for each in self._mapped
            for at, part in zip(accumulate((p.stop - p.first for p in each.ranges), initial=0), each.ranges)
        ]
        kept = moved(self._inner.stored, tensors, ranges)
        new = ChunkTable.of([(each.info, *_new_rows(each)) for each in self._grown])
        new = new.renumbered(tensors, np.array([tensors.numbers[name] for name in new.names], np.int64))
        chunks = ChunkTable.concatenate([kept.chunks, new])
        part = np.concatenate([kept.part, self._num_files + np.arange(len(new))])
        offset = np.concatenate([kept.offset, np.zeros(len(new), np.int64)])
        return StoredChunks(chunks, part, offset).take(np.argsort(chunks.tensor, kind="stable"))

    @property
    def bytes_read(self) -> int:
        """Bytes of data files read so far."""
        return self._inner.bytes_read

    def plan(self, chunks: ChunkTable) -> LoadPlan:
        """Return the copies that fill wanted chunks."""
        return planned(self, chunks, self.stored)

    def read(self, chunks: ChunkTable, targets: Sequence[int] | Columns) -> None:
        """Fill memory with wanted chunks, and add what is of the source to the sums of its tensors."""
        read_chunks(self, chunks, targets)
        self._sums.add(chunks, np.asarray(targets, np.int64))

    def check_read(self) -> int:
        """Return how many tensors of the source were read whole and are equal to what was saved; else CheckFailed."""
        return self._sums.check()

    def fetch(
        self, plan: LoadPlan, addresses: Ints, sums: SumPlaces | None = None, num_threads: int | None = None
    ) -> None:
        """Make the copies of a plan, each to an address of its own; new rows are in no sums."""
        stored = np.flatnonzero(plan.part < self._num_files)
        self._inner.fetch(plan.take(stored), addresses[stored], sums and sums.take(stored), num_threads)
        for row in np.flatnonzero(plan.part >= self._num_files).tolist():
            tensor, size = self._grown[int(plan.part[row]) - self._num_files], int(plan.size[row])
            memory = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(int(addresses[row])))
            values = self._row(tensor)
            memory[:] = np.resize(np.roll(values, -(int(plan.source[row]) % max(len(values), 1))), size)

    def close(self) -> None:
        """Close nothing: the files are the inner reader's."""

    def _row(self, tensor: Mapped) -> Bytes:
        """Return the bytes of one new row."""
        name, info = tensor.info.name, tensor.info
        if name not in self._rows:
            zeros = np.zeros(info.size_bytes // info.shape[0], np.uint8)
            if isinstance(tensor.fill, bytes):  # of all rows, each of one byte
                self._rows[name] = np.frombuffer(tensor.fill, np.uint8)
            else:
                self._rows[name] = zeros if tensor.fill == "zeros" else self._mean(tensor)
        return self._rows[name]

    def _mean(self, tensor: Mapped) -> Bytes:
        """Return the mean of a tensor's rows, summed in float64."""
        dtype, width = tensor.info.dtype, tensor.info.numel // tensor.info.shape[0]
        rows_at_once = max(MEAN_BYTES // max(width * ITEMSIZE[dtype], 1), 1)
        total = np.zeros(width)
        buffer = np.empty(min(rows_at_once, tensor.num_rows) * width * ITEMSIZE[dtype], np.uint8)
        for part in tensor.ranges:
            for start in range(part.first, part.stop, rows_at_once):
                stop = min(start + rows_at_once, part.stop)
                [block] = fill(self._inner, [(part.source, start * width, stop * width)], buffer)
                total += widened(block, dtype).reshape(-1, width).sum(axis=0)
        return narrowed(total / tensor.num_rows, dtype)


def _new_rows(tensor: Mapped) -> tuple[Box, int, int]:
    """Return the box of the rows that the source has not, and the range of all its positions."""
    num_old, rest = tensor.num_rows, tensor.info.shape[1:]
    box = Box((num_old, *(0 for _ in rest)), (tensor.info.shape[0] - num_old, *rest))
    return box, 0, box.numel
