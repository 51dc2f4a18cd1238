"""FolderReader: a folder of another program's open for planned reads, as CheckpointReader opens a step of a run.

A plan's parts are the folder's files, and behind these what the folder holds with its elements in another order: that
is read whole and put in order in memory. Nothing is verified, as the folder has no checksums.
"""

import threading
from collections.abc import Mapping

import numpy as np

from ckptkit.format.root import Root
from ckptkit.io.blocks import Bytes, SumPlaces, copy_many
from ckptkit.io.data_files import DataReader, open_reader
from ckptkit.loading.reader import CheckpointReader
from ckptkit.model.chunk_table import ChunkTable, Ints
from ckptkit.model.layout import ParallelLayout
from ckptkit.plan.load_plan import LoadPlan
from threefold.storage import Storage


class FolderReader(CheckpointReader):
    """The tensors of a folder under the names of a run; use it in a `with`. A kind of folder says what is `stored`."""

    can_sum = False

    def __init__(self, storage: Storage, root: Root, url: str, sizes: Mapping[str, int]) -> None:
        super().__init__(storage, root.step, root=root)
        self.url = url
        self._sizes, self._names = sizes, list(sizes)
        self._readers: dict[str, DataReader] = {}
        self._lock = threading.RLock()  # of what is open, and of what is put in order

    def ordered(self, number: int) -> Bytes:
        """Return the bytes of the part behind the files that has a number; one thread at a time asks."""
        raise NotImplementedError

    def attempt_for(self, layout: ParallelLayout) -> str:
        """Return for an import the attempt of the folder's root, which follows from its files."""
        return self.root.attempt if layout == ParallelLayout() else super().attempt_for(layout)

    @property
    def bytes_read(self) -> int:
        """Bytes of files read so far."""
        return sum(reader.bytes_read for reader in self._readers.values())

    def plan(self, wanted: ChunkTable) -> LoadPlan:
        """Return the copies that fill wanted chunks."""
        return self._planned(wanted, self.stored)

    def fetch(
        self, plan: LoadPlan, addresses: Ints, sums: SumPlaces | None = None, num_threads: int | None = None
    ) -> None:
        """Make the copies of a plan, each to an address of its own; several threads may."""
        assert sums is None, "it cannot sum what it reads"
        rows = np.stack([plan.source, plan.size, addresses], axis=1).astype(np.uint64)
        parts, first = np.unique(plan.part, return_index=True)
        ends = [*first[1:].tolist(), len(plan)]
        for part, start, stop in zip(parts.tolist(), first.tolist(), ends, strict=True):
            if part < len(self._names):
                reader = self._reader(self._names[part])
                reader.read(rows[start:stop], num_threads=num_threads or self.num_threads)
                continue
            with self._lock:
                values = self.ordered(part - len(self._names))
            copies = rows[start:stop, [0, 2, 1]]
            copies[:, 0] += np.uint64(values.ctypes.data)
            copy_many(copies)

    def close(self) -> None:
        """Close all files."""
        while self._readers:
            self._readers.popitem()[1].close()

    def _reader(self, name: str) -> DataReader:
        with self._lock:
            if name not in self._readers:
                self._readers[name] = open_reader(self.storage, name, self._sizes[name], None)
            return self._readers[name]
