"""MappedSums: what a mapping reads of each tensor of its source is compared with the certificate of the save.

Rows keep their places of the source in the sums, wherever the mapping puts them. Tensors of which rows are dropped
cannot be compared; rows that are repeated count once.
"""

from collections.abc import Iterable
from shlex import quote

import numpy as np

from ckptkit.format.root import Root
from ckptkit.io.sums import ChunkSums
from ckptkit.mapping.mapped import Mapped, RowRange, moved, num_rows
from ckptkit.model.chunk_table import ChunkTable, Ints, TensorColumns
from ckptkit.plan.certificate import digest, is_readable
from ckptkit.plan.stored import StoredChunks
from threefold.errors import CheckFailed, listed


class MappedSums:
    """The sums of the tensors of a source, of which each element is read once for each place that it is put at."""

    def __init__(self, root: Root, url: str, mapped: Iterable[Mapped]) -> None:
        self._saved = root.certificate if is_readable(root.certificate) else None
        self._url, self._tensors = url, list(root.tensors.values())
        self._columns = TensorColumns.of(self._tensors)
        self._ranges = self._whole(mapped)
        self._num_read = np.zeros(len(self._tensors), np.int64)
        self._values = np.zeros(len(self._tensors), np.uint64)

    def add(self, wanted: ChunkTable, addresses: Ints) -> None:
        """Add chunks of the mapping's output, which are in memory at addresses."""
        if self._saved is None or not self._ranges:
            return
        order = np.argsort(wanted.tensor, kind="stable")
        there = StoredChunks(wanted.take(order), order, addresses[order])
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
