"""ForeignFolder: a folder of another program on any storage, with the face of a run of one step, 0.

A FolderSource is one open for planned reads, beside CheckpointReader for a step of a run. A plan's parts are the
folder's files, and behind these what the folder holds with its elements in another order: that is read whole and put in
order in memory. Nothing is verified, as the folder has no checksums.

An import makes it a committed step of a run, in one pass and bounded memory. The name of the attempt follows from the
folder's files, so a run that was killed is repeated with the same keys and the same bytes.
"""

import hashlib
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import ClassVar, Protocol

import numpy as np

from ckptkit.format.root import Root
from ckptkit.io.blocks import Bytes, Columns, SumPlaces, place
from ckptkit.io.data_files import DataReader, open_reader
from ckptkit.loading.chunk_source import attempt_made_of, planned, read_chunks, usual_threads
from ckptkit.model.chunk_table import ChunkTable, Ints
from ckptkit.model.layout import ParallelLayout
from ckptkit.plan.load_plan import LoadPlan
from ckptkit.plan.stored import StoredChunks
from ckptkit.rewrite.reshard import ReshardReport, reshard
from threefold.closing import Closing
from threefold.storage import Storage, open_storage

NOTE = ".export.json"  # in the folder of an export of ours that is not finished


class FolderParts(Protocol):
    """What a kind of folder says of its tensors: in which part each chunk is, and what the parts behind files hold."""

    @property
    def stored(self) -> StoredChunks:
        """All chunks: the part and the place of each."""

    def ordered(self, number: int) -> Bytes:
        """Return the bytes of the part behind the files that has a number; one thread at a time asks."""


class FolderFiles(Closing):
    """The files of a folder by their sizes, each open from its first read on; several threads may read."""

    def __init__(self, storage: Storage, sizes: Mapping[str, int]) -> None:
        self.names = list(sizes)
        self.numbers = {name: number for number, name in enumerate(sizes)}
        self.other_bytes = 0  # that were read in another way
        self._storage, self._sizes = storage, sizes
        self._readers: dict[str, DataReader] = {}
        self._lock = threading.Lock()

    def read(self, name: str, rows: object, sums: SumPlaces | None = None, num_threads: int | None = None) -> None:
        """Fill memory from rows of (offset, bytes, address) of a file, sorted by offset."""
        with self._lock:
            if name not in self._readers:
                self._readers[name] = open_reader(self._storage, name, self._sizes[name], None)
            reader = self._readers[name]
        reader.read(np.asarray(rows, np.uint64), num_threads=num_threads or usual_threads(), sums=sums)

    @property
    def bytes_read(self) -> int:
        """Bytes of files read so far."""
        return self.other_bytes + sum(reader.bytes_read for reader in self._readers.values())

    def close(self) -> None:
        """Close all files."""
        while self._readers:
            self._readers.popitem()[1].close()


class FolderSource(Closing):
    """The tensors of a folder under the names of a run, a ChunkSource; use it in a `with`."""

    files = None  # of a step of a run

    def __init__(self, root: Root, url: str, files: FolderFiles, parts: FolderParts) -> None:
        self.root, self.url = root, url
        self._files, self._parts = files, parts
        self._ordering = threading.Lock()

    def attempt_for(self, layout: ParallelLayout) -> str:
        """Return for an import the attempt of the folder's root, which follows from its files."""
        return self.root.attempt if layout == ParallelLayout() else attempt_made_of(self.root.to_bytes(), layout)

    @cached_property
    def stored(self) -> StoredChunks:
        """All chunks: the part and the place of each."""
        return self._parts.stored

    @property
    def bytes_read(self) -> int:
        """Bytes of files read so far."""
        return self._files.bytes_read

    def plan(self, chunks: ChunkTable) -> LoadPlan:
        """Return the copies that fill wanted chunks."""
        return planned(self, chunks, self.stored)

    def read(self, chunks: ChunkTable, targets: Sequence[int] | Columns) -> None:
        """Fill memory with wanted chunks, each at its target address; CheckFailed where data is missing or damaged."""
        read_chunks(self, chunks, targets)

    def check_read(self) -> int:
        """Return 0: whoever reads it compares what is read."""
        return 0

    def fetch(
        self, plan: LoadPlan, addresses: Ints, sums: SumPlaces | None = None, num_threads: int | None = None
    ) -> None:
        """Make the copies of a plan, each to an address of its own; several threads may."""
        rows = np.stack([plan.source, plan.size, addresses], axis=1).astype(np.uint64)
        parts, first = np.unique(plan.part, return_index=True)
        ends = [*first[1:].tolist(), len(plan)]
        names = self._files.names
        for part, own in zip(parts.tolist(), map(slice, first.tolist(), ends), strict=True):
            of_part = sums and sums.take(own)
            if part < len(names):
                self._files.read(names[part], rows[own], of_part, num_threads)
                continue
            with self._ordering:
                values = self._parts.ordered(part - len(names))
            place(values, 0, rows[own], None, of_part)

    def close(self) -> None:
        """Close all files."""
        self._files.close()


class ForeignFolder:
    """One folder, with the methods of a Run that holds one step; nothing is read before the first of them."""

    scheme: ClassVar[str]  # of its address
    allows_missing_chunks = False  # whether a chunk that is not there is one of fill values

    def __init__(self, url: str) -> None:
        self._place = url.removeprefix(self.scheme) if self.is_meant(url) else url
        self.url, self.named = f"{self.scheme}{self._place}", 0

    @classmethod
    def is_meant(cls, url: str) -> bool:
        """Return whether an address is one of such a folder."""
        return url.startswith(cls.scheme) and not url.startswith(f"{cls.scheme}//")

    @cached_property
    def storage(self) -> Storage:
        """Return the storage of the folder, opened at first use."""
        return open_storage(self._place)

    def open(self, step: int, exchange: object = None) -> FolderSource:
        """Return a reader, for a `with`; the ranks of an exchange read each for itself."""
        raise NotImplementedError

    def newest_first(self) -> Iterator[int]:
        """Return its only step."""
        return iter([self.resolve()])

    def resolve(self) -> int:
        """Return its only step; an error if the folder is not sound."""
        return self.root(self.named).step

    def root(self, step: int, exchange: object = None) -> Root:
        """Return the root that a run has whose step this folder is."""
        raise NotImplementedError

    @property
    def files(self) -> Collection[str]:
        """The files that are read."""
        raise NotImplementedError

    @cached_property
    def attempt(self) -> str:
        """The name that every import of this folder, as it is now, has on a run's storage."""
        state = hashlib.sha256(self.storage.url.encode())
        for name in sorted(self.files):
            state.update(repr(self.storage.info(name)).encode())
        return f"import-{state.hexdigest()[:12]}"


def import_folder(
    folder: ForeignFolder,
    storage: Storage,
    *,
    step: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
    dry_run: bool = False,
) -> ReshardReport:
    """Write a folder into a run as a step, its placements set so that any layout can load it, and commit it.

    UserError if the step is there already, unless the same call made it, or if another process is making it. With
    `dry_run` all is checked, nothing is written.
    """
    with folder.open(step) as reader:
        return reshard(reader, storage, ParallelLayout(), step=step, progress=progress, dry_run=dry_run)
