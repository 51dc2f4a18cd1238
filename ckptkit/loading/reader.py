"""CheckpointReader: one committed checkpoint open for planned, verified reads, whatever storage it lies on.

Every byte handed out was verified against the checksum of its granule. Reads that ascend in each data file over several
calls (all passes in storage order do) read every granule once.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from typing import Self

import numpy as np

from ckptkit.chunk_table import ChunkTable, Ints, TensorColumns
from ckptkit.format.part_index import PartIndex
from ckptkit.format.root import MAX_ROOT_BYTES, ROOT_KEY, Part, Root, step_folder
from ckptkit.io.blocks import GRANULE_BYTES, BlockReader, Columns, DamagedGranule, xxh3_64
from ckptkit.io.remote_reader import RemoteReader
from ckptkit.plan import Bounds, LoadPlan, PartJoin, StoredChunks, plan_load
from threefold.errors import CheckFailed, StorageError, UserError
from threefold.storage import Storage
from threefold.storage.local import local_failure

MAX_OPEN_FILES = 128  # each keeps a granule
MIN_INDEX_THREADS = 8


class CheckpointReader:
    """Root, part indexes and data of one step; use it in a `with`.

    `num_threads` bounds the threads that read data. The part indexes are read on first use.
    """

    def __init__(self, storage: Storage, step: int, *, num_threads: int = 4) -> None:
        self.storage = storage
        self.folder = step_folder(step)
        self.url = f"{storage.url}/{self.folder}"
        self.num_threads = num_threads
        self.root = read_root(storage, step)
        self._known: dict[bytes, TensorColumns] = {}
        self._checksums: dict[int, Columns] = {}
        self._open: OrderedDict[int, BlockReader | RemoteReader] = OrderedDict()
        self._closed_bytes_read = 0

    @cached_property
    def stored(self) -> StoredChunks:
        """All chunks of the checkpoint."""
        return self._join(None)

    def plan(self, wanted: ChunkTable) -> LoadPlan:
        """The copies that fill wanted chunks; holds no more of the part indexes than may meet them."""
        return plan_load(wanted, self._join(Bounds.of(wanted, TensorColumns.of(list(self.root.tensors.values())))))

    @property
    def bytes_read(self) -> int:
        """Bytes of data files read so far."""
        return self._closed_bytes_read + sum(source.bytes_read for source in self._open.values())

    def read_index(self, part: Part) -> PartIndex:
        """One part index, verified against the root."""
        where, key = f"{self.url}/{part.index}", f"{self.folder}/{part.index}"
        with self._told_as_damage(key, part.index_bytes):
            data = bytes(self.storage.read_ranges(key, [(0, part.index_bytes)])[0])
        if xxh3_64(data) != part.index_xxh3:
            raise CheckFailed(f"{where} is damaged: its checksum is not the one in {ROOT_KEY}")
        index = PartIndex.from_bytes(data, where, self._known)
        if index.size_bytes != part.data_bytes:
            raise CheckFailed(f"{where} describes {index.size_bytes} bytes, {ROOT_KEY} {part.data_bytes}")
        return index

    def read(self, wanted: ChunkTable, targets: Sequence[int] | Columns) -> None:
        """Fill memory with wanted chunks, each at its target address; CheckFailed where data is missing or damaged."""
        self.execute(plan_load(wanted, self.stored), targets)

    def execute(self, plan: LoadPlan, targets: Sequence[int] | Columns) -> None:
        """Make the copies of a plan; `targets` are the addresses of the wanted chunks."""
        self.fetch(plan, np.asarray(targets, np.uint64).astype(np.int64)[plan.wanted] + plan.target)

    def fetch(self, plan: LoadPlan, addresses: Ints) -> None:
        """Make the copies of a plan, each to an address of its own."""
        rows = np.stack([plan.source, plan.size, addresses], axis=1).astype(np.uint64)
        parts, first = np.unique(plan.part, return_index=True)
        ends = [*first[1:].tolist(), len(plan)]
        for begin in range(0, len(parts), MAX_OPEN_FILES):
            group = slice(begin, begin + MAX_OPEN_FILES)
            sources = [self._source(part) for part in parts[group].tolist()]
            num_threads = max(self.num_threads // max(len(sources), 1), 1)
            jobs = [(p, s, rows[a:b], num_threads) for p, s, a, b in
                    zip(parts[group].tolist(), sources, first[group].tolist(), ends[group], strict=True)]  # fmt: skip
            with ThreadPoolExecutor(self.num_threads) as pool:
                for _ in pool.map(lambda job: self._read_part(*job), jobs):
                    pass

    def open_part(self, number: int, expected: Columns | None) -> BlockReader | RemoteReader:
        """A reader of one data file that the caller closes; unverified where `expected` is None."""
        part = self.root.parts[number]
        key = f"{self.folder}/{part.data}"
        path = self.storage.local_path(key)
        if path is None:
            return RemoteReader(self.storage, key, part.data_bytes, expected)
        with _as_storage_error(str(path)):
            return BlockReader(path, part.data_bytes, expected)

    def close(self) -> None:
        """Close all files."""
        while self._open:
            self._drop_oldest()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _join(self, bounds: Bounds | None) -> StoredChunks:
        """The chunks of all part indexes, read side by side, and on the way the checksums of all granules."""
        join = PartJoin(list(self.root.tensors.values()), bounds)

        def read(number: int) -> StoredChunks:
            index = self.read_index(self.root.parts[number])
            self._checksums[number] = index.checksums
            return join.of(number, index)

        with ThreadPoolExecutor(max(self.num_threads, MIN_INDEX_THREADS)) as pool:
            return join.joined(list(pool.map(read, range(len(self.root.parts)))))

    def _source(self, number: int) -> BlockReader | RemoteReader:
        if number in self._open:
            self._open.move_to_end(number)
        else:
            if len(self._open) >= MAX_OPEN_FILES:
                self._drop_oldest()
            part = self.root.parts[number]
            with self._told_as_damage(f"{self.folder}/{part.data}", part.data_bytes):
                self._open[number] = self.open_part(number, self._checksums[number])
        return self._open[number]

    def _drop_oldest(self) -> None:
        _, source = self._open.popitem(last=False)
        self._closed_bytes_read += source.bytes_read
        source.close()

    def _read_part(self, number: int, source: BlockReader | RemoteReader, rows: Columns, num_threads: int) -> None:
        part = self.root.parts[number]
        name = f"{self.url}/{part.data}"
        try:
            with self._told_as_damage(f"{self.folder}/{part.data}", part.data_bytes), _as_storage_error(name):
                source.read(rows, num_threads=num_threads)
        except DamagedGranule as damage:
            start = damage.granule * GRANULE_BYTES
            tensors = self.read_index(self.root.parts[number]).tensors_between(start, start + GRANULE_BYTES)
            raise DamagedGranule(name, damage.granule, tensors) from None

    @contextmanager
    def _told_as_damage(self, key: str, size_bytes: int) -> Iterator[None]:
        """Tell a failure to read a file that is gone or of another size as damage: no later try will mend that."""
        try:
            yield
        except StorageError as failure:
            found = self.storage.info(key)
            if found is not None and found.size_bytes == size_bytes:
                raise
            held = "is missing" if found is None else f"has {found.size_bytes} bytes"
            raise CheckFailed(f"{self.storage.url}/{key} {held}, it should have {size_bytes}") from failure


def read_root(storage: Storage, step: int) -> Root:
    """The root of a committed step; UserError where there is none."""
    key = f"{step_folder(step)}/{ROOT_KEY}"
    info = storage.info(key)
    if info is None:
        raise UserError(f"{storage.url} holds no committed step {step}", hint=f"ckptkit ls {storage.url}")
    if info.size_bytes > MAX_ROOT_BYTES:
        raise CheckFailed(f"{storage.url}/{key} has {info.size_bytes} bytes, more than a checkpoint's root may have")
    root = Root.from_bytes(storage.read(key), f"{storage.url}/{key}")
    if root.step != step:
        raise CheckFailed(f"{storage.url}/{key} is the root of step {root.step}")
    return root


@contextmanager
def _as_storage_error(name: str) -> Iterator[None]:
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise local_failure(error, "read", name) from error


def addresses_of(arrays: Iterable[np.ndarray]) -> Columns:
    """The addresses of contiguous arrays, for `read` and `execute`; the caller keeps the arrays alive."""
    return np.array([array.ctypes.data for array in arrays], np.uint64)
