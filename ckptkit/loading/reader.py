"""CheckpointReader: one committed checkpoint open for planned, verified reads, whatever storage holds it.

Every byte handed out was verified against the checksum of its granule. Reads that ascend in each data file over several
calls (all passes in storage order do) read every granule once.
"""

import resource
import threading
import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from ckptkit.format.root import Root
from ckptkit.io.blocks import Columns, SumPlaces
from ckptkit.io.data_files import DataReader
from ckptkit.loading.chunk_source import attempt_made_of, planned, read_chunks, usual_threads
from ckptkit.loading.exchange import Alone, Exchange, on_all
from ckptkit.loading.roots import read_root
from ckptkit.loading.step_files import MAX_GROUP_BYTES, FilePlaces, OnePlace, StepFiles
from ckptkit.model.chunk_table import ChunkTable, Ints, TensorColumns
from ckptkit.model.layout import ParallelLayout
from ckptkit.plan.load_plan import LoadPlan
from ckptkit.plan.stored import Bounds, PartJoin, StoredChunks
from threefold.closing import Closing
from threefold.storage import Storage

# each keeps a granule and two descriptors, and two checkpoints may be open
# members of `files` that a reader had itself in the version before
MOVED = {
    "check_still_there", "folder", "index_file", "is_given_up", "loss_as_damage", "open_part", "read_index",
    "read_indexes", "read_part", "size_faults", "storage",
}  # fmt: skip
MOVED_TO_PLACES = {"name_of", "ranks_that_read", "readable", "storage_of"}


class CheckpointReader(Closing):
    """Root, part indexes and data of one step, a ChunkSource; use it in a `with`.

    `num_threads` bounds the threads that read data, by default `usual_threads`. The part indexes are read on first use.
    The ranks of an `exchange` open a checkpoint together and plan together: root and part indexes are then read by one
    of them each. `root` is given where it is known and not there yet, `places` where the files are not in one folder.
    """

    files: StepFiles
    max_open_files = max(4, min(128, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8))

    def __init__(
        self, storage: Storage, step: int, *, num_threads: int | None = None, exchange: Exchange | None = None,
        root: Root | None = None, places: FilePlaces | None = None,
    ) -> None:  # fmt: skip
        self.num_threads = num_threads or usual_threads()
        self.exchange = exchange or Alone()
        places = places or OnePlace(storage, step, self.exchange.size)
        there = root or read_root(storage, step, self.exchange)
        self.files = StepFiles(storage, there, self.exchange, places, was_committed=root is None)
        self.url = places.url
        self._all_chunks: StoredChunks | None = None
        self._checksums: dict[int, Columns] = {}
        self._open: OrderedDict[int, DataReader] = OrderedDict()  # the one used last is the last
        self._uses, self._opening = Counter[int](), threading.Lock()
        self._closed_bytes_read = 0

    @property
    def root(self) -> Root:
        """The root of the step."""
        return self.files.root

    @cached_property
    def stored(self) -> StoredChunks:
        """All chunks of the checkpoint: some 80 bytes each are held, thrice that while the part indexes are joined."""
        return self._join(None)

    def plan(self, chunks: ChunkTable) -> LoadPlan:
        """Return the copies that fill wanted chunks; holds no more of the part indexes than may meet them."""
        stored = self._chunks_for(chunks)
        return on_all(self.exchange, lambda: planned(self, chunks, stored))

    def _chunks_for(self, chunks: ChunkTable) -> StoredChunks:
        """Return the stored chunks that wanted ones may meet; where there are few, all, for the next plan too."""
        if sum(part.index_bytes for part in self.root.parts) > MAX_GROUP_BYTES:
            return self._join(Bounds.of(chunks, TensorColumns.of(list(self.root.tensors.values()))))
        if self._all_chunks is None:  # no cached_property: its lock is one of all threads, which may be ranks
            self._all_chunks = self._join(None)
        return self._all_chunks

    @property
    def identity(self) -> bytes:
        """What all that is read follows from."""
        return self.root.to_bytes()

    def attempt_for(self, layout: ParallelLayout) -> str:
        """Return the attempt that writes this checkpoint for a layout: equal in every try, on every machine."""
        return attempt_made_of(self.identity, layout)

    @property
    def bytes_read(self) -> int:
        """Bytes of data files read so far."""
        return self._closed_bytes_read + sum(source.bytes_read for source in self._open.values())

    def read(self, chunks: ChunkTable, targets: Sequence[int] | Columns) -> None:
        """Fill memory with wanted chunks, each at its target address; CheckFailed where data is missing or damaged."""
        read_chunks(self, chunks, targets)

    def check_read(self) -> int:
        """Return 0: whoever reads it compares what is read."""
        return 0

    def execute(self, plan: LoadPlan, targets: Sequence[int] | Columns) -> None:
        """Make the copies of a plan; `targets` are the addresses of the wanted chunks."""
        self.fetch(plan, np.asarray(targets, np.uint64).astype(np.int64)[plan.row] + plan.target)

    def fetch(
        self, plan: LoadPlan, addresses: Ints, sums: SumPlaces | None = None, num_threads: int | None = None
    ) -> None:
        """Make the copies of a plan, each to an address of its own, and add them to `sums`, if there are any.

        Several threads may fetch at once, by default each with the reader's number of threads.
        """
        num_threads = num_threads or self.num_threads
        rows = np.stack([plan.source, plan.size, addresses], axis=1).astype(np.uint64)
        parts, first = np.unique(plan.part, return_index=True)
        ends = [*first[1:].tolist(), len(plan)]
        spans = list(zip(parts.tolist(), map(slice, first.tolist(), ends), strict=True))
        for begin in range(0, len(spans), self.max_open_files):
            group = spans[begin : begin + self.max_open_files]
            threads_each = max(num_threads // len(group), 1)

            def read(span: tuple[int, slice], num_threads: int = threads_each) -> None:
                number, own = span
                with self._opened(number) as source:
                    self.files.read_part(number, source, rows[own], num_threads, sums and sums.take(own))

            if len(group) == 1:
                read(group[0])
                continue
            with ThreadPoolExecutor(min(num_threads, len(group))) as pool:
                for _ in pool.map(read, group):
                    pass

    def close(self) -> None:
        """Close all files."""
        for number in list(self._open):
            self._close(number)

    def _join(self, bounds: Bounds | None) -> StoredChunks:
        """Return the chunks of all part indexes, and on the way the checksums of all granules."""
        join = PartJoin(list(self.root.tensors.values()), bounds)
        joined = []
        for number, index in enumerate(self.files.read_indexes()):
            self._checksums[number] = index.checksums
            joined.append(join.of(number, index, self.files.places.name_of(self.root.parts[number].index)))
        return join.joined(joined)

    @contextmanager
    def _opened(self, number: int) -> Iterator[DataReader]:
        """Yield the open data file of a part; up to `max_open_files` stay open, and more while they are in use."""
        with self._opening:
            if number not in self._open:
                idle = [each for each in self._open if not self._uses[each]]
                for each in idle[: max(len(self._open) - self.max_open_files + 1, 0)]:
                    self._close(each)
                part = self.root.parts[number]
                with self.files.loss_as_damage(part.data, part.data_bytes, part):
                    self._open[number] = self.files.open_part(number, self._checksums[number], from_cache=True)
            self._open.move_to_end(number)
            self._uses[number] += 1
        try:
            yield self._open[number]
        finally:
            with self._opening:
                self._uses[number] -= 1

    def _close(self, number: int) -> None:
        source = self._open.pop(number)
        self._closed_bytes_read += source.bytes_read
        source.close()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            """Return a member that moved to `files` or their places, for programs of the version before."""
            place = "files" if name in MOVED else "files.places" if name in MOVED_TO_PLACES else None
            if place is None:
                raise AttributeError(f"CheckpointReader has no attribute {name!r}")
            warnings.warn(f"CheckpointReader.{name} is now CheckpointReader.{place}.{name}", DeprecationWarning, 2)
            return getattr(attrgetter(place)(self), name)
