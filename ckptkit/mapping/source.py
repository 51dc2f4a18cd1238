"""MappedSource: a checkpoint read under the names and shapes of a mapping, as if it had been saved so.

Rows that a tensor gets are parts of their own behind the data files: one row in memory, which is repeated.

What is read of each tensor of the source is compared with the certificate of the save. Rows keep their places of the
source in the sums, wherever the mapping puts them. Tensors of which rows are dropped cannot be compared; rows that are
repeated count once.
"""

import ctypes
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from shlex import quote

import numpy as np

from ckptkit.check.elements import narrowed, widened
from ckptkit.check.slabs import fill
from ckptkit.format.root import Root
from ckptkit.io.blocks import Bytes, Columns, SumPlaces
from ckptkit.io.sums import ChunkSums
from ckptkit.loading.chunk_source import ChunkSource, attempt_made_of, planned, read_chunks
from ckptkit.loading.step_files import StepFiles
from ckptkit.mapping.mapped import Mapped, RowRange, moved, num_rows
from ckptkit.mapping.mapper import Mapper
from ckptkit.model.chunk_table import ChunkTable, Ints, TensorColumns
from ckptkit.model.layout import ParallelLayout
from ckptkit.model.tensor import ITEMSIZE, Box
from ckptkit.plan.certificate import digest, is_readable
from ckptkit.plan.load_plan import LoadPlan
from ckptkit.plan.stored import StoredChunks
from threefold.closing import Closing
from threefold.errors import CheckFailed, listed

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


class MappedSums:
    """The sums of the tensors of a source, of which each element is read once for each place that it is put at."""

    def __init__(self, root: Root, url: str, mapped: Iterable[Mapped]) -> None:
        self._saved = root.certificate if is_readable(root.certificate) else None
        self._url, self._tensors = url, list(root.tensors.values())
        self._columns = TensorColumns.of(self._tensors)
        self._ranges = self._whole(mapped)
        self._num_read = np.zeros(len(self._tensors), np.int64)
        self._values = np.zeros(len(self._tensors), np.uint64)

    def add(self, output: ChunkTable, addresses: Ints) -> None:
        """Add chunks of the mapping's output, which are in memory at addresses."""
        if self._saved is None or not self._ranges:
            return
        order = np.argsort(output.tensor, kind="stable")
        there = StoredChunks(output.take(order), order, addresses[order])
        source = moved(there, self._columns, self._ranges)
        chunks, sizes = source.chunks, source.chunks.size_bytes
        sums = ChunkSums(chunks, 0)
        begins = np.cumsum(sizes) - sizes
        for row in zip(source.offset.tolist(), sizes.tolist(), begins.tolist(), strict=True):
            sums.add_at(*row)
        self._values ^= sums.values
        np.add.at(self._num_read, chunks.tensor, chunks.stop - chunks.start)

    def check(self) -> int:
        """Return how many tensors were read whole and are equal to what was saved; CheckFailed names others."""
        if self._saved is None:
            return 0
        whole = [n for n, info in enumerate(self._tensors) if self._num_read[n] == info.numel > 0]
        wrong = [
            self._tensors[n].name for n in whole
            if self._saved["tensors"].get(self._tensors[n].name) != digest(self._tensors[n], int(self._values[n]))
        ]  # fmt: skip
        if wrong:
            text = f"what was read of {self._url} is not equal to what was saved, by the certificate:{listed(wrong)}"
            raise CheckFailed(text, hint=f"ckptkit verify {quote(self._url)}")
        return len(whole)

    def _whole(self, mapped: Iterable[Mapped]) -> list[tuple[int, int, RowRange]]:
        """Return for each tensor of the source that goes out whole where its rows are: as `moved` takes them."""
        places: dict[str, list[tuple[int, int, RowRange]]] = {}
        for tensor in mapped:
            at = 0
            for part in tensor.ranges:
                number, length = self._columns.numbers[part.source.name], part.stop - part.first
                place = (number, part.first, RowRange(tensor.info, at, at + length))
                others = places.setdefault(part.source.name, [])
                if all(part.stop <= first or first + r.stop - r.first <= part.first for _, first, r in others):
                    others.append(place)
                at += length
        rows = {info.name: num_rows(info) for info in self._tensors}
        whole = [some for name, some in places.items() if sum(r.stop - r.first for _, _, r in some) == rows[name]]
        return [tensor for some in whole for tensor in some]
