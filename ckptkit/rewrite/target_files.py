"""Target files: the data files of a reshard, filled batch by batch out of a source that is read once.

One pass over all tensors in storage order: the elements of a slab are read once, in ascending order of every source
file, and appended to each target file that holds them, since its chunks stand in the same order.
"""

import mmap
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from ckptkit.format.data_file import DataFile
from ckptkit.format.keys import part_keys
from ckptkit.format.part_index import PartIndex
from ckptkit.format.root import Part
from ckptkit.io.blocks import GRANULE_BYTES, Bytes, Columns, xxh3_64
from ckptkit.io.data_files import DataWriter, open_writer
from ckptkit.loading.chunk_source import RewriteSource
from ckptkit.model.chunk_table import ChunkTable, Ints, TensorColumns, ramps
from ckptkit.model.layout import ParallelLayout
from ckptkit.model.ranks import Partition
from ckptkit.model.slab import Slab, positions_before
from ckptkit.plan.save_plan import plan_files
from threefold.errors import CheckFailed
from threefold.storage import Storage

PAGE_BYTES = 4096


@dataclass(eq=False)
class TargetFile:
    """One data file of a target rank while it is written."""

    keys: tuple[str, str]
    file: DataFile
    position: int = 0  # file bytes that the loader has placed
    flushed: int = 0  # of these, those that went to the writer; the rest waits in `waiting`
    waiting: Bytes = field(default_factory=lambda: np.empty(0, np.uint8))
    writer: DataWriter | None = None
    checksums: list[Columns] = field(default_factory=list)
    sums: Columns | None = None  # of its tensors, from the first byte that is written on
    part: Part | None = None

    def part_of(self, index: bytes) -> Part:
        """Return the part that the file is with such an index."""
        return Part(self.keys[0], self.file.size_bytes, self.keys[1], len(index), xxh3_64(index))


@dataclass(frozen=True)
class BatchArea:
    """The bytes of one batch for one file: room for what waits, then the new bytes, contiguous and page-aligned."""

    target: TargetFile
    memory: Bytes
    num_waiting: int


def target_files(partition: Partition, layout: ParallelLayout, attempt: str) -> list[TargetFile]:
    """Return the files of all target ranks, writer n being rank n."""
    files = []
    for rank in range(layout.world_size):
        chunks = partition.table(layout.coords(rank))
        plan = plan_files(chunks, np.arange(len(chunks)))
        files += [TargetFile(part_keys(attempt, rank, n), file) for n, file in enumerate(plan.files)]
    return files


def sealed_part(storage: Storage, folder: str, target: TargetFile, sizes: Mapping[str, int]) -> PartIndex | None:
    """Return the index of a file that was written as planned, by any process, None if it was not; read no data.

    `sizes` are those of all keys that are there. The part is the target's from then on.
    """
    data_key, index_key = (f"{folder}/{key}" for key in target.keys)
    if sizes.get(data_key) != target.file.size_bytes or index_key not in sizes:
        return None
    content = storage.read(index_key)
    try:
        index = PartIndex.from_bytes(content, f"{storage.url}/{index_key}")
    except CheckFailed:
        return None
    if content != target.file.index(index.checksums, index.sums).to_bytes():
        return None
    target.sums = index.sums
    target.part = target.part_of(content)
    return index


class Loader:
    """Reads batches of slabs into areas, one an affected target file. Two arenas alternate."""

    def __init__(self, source: RewriteSource, targets: list[TargetFile]) -> None:
        self._source = source
        self._targets = targets
        columns = source.stored.chunks.tensors
        self._chunks, self._owners = _by_tensor(targets, columns)
        numbers = np.arange(len(columns.names))
        self._first, self._end = (np.searchsorted(self._chunks.tensor, numbers, side) for side in ("left", "right"))
        self._arenas = [mmap.mmap(-1, PAGE_BYTES), mmap.mmap(-1, PAGE_BYTES)]
        for target in targets:
            target.waiting = np.frombuffer(target.file.header, np.uint8)
            target.position = len(target.file.header)

    def load(self, batch: list[Slab]) -> list[BatchArea]:
        """Return the areas of one batch, filled but for what waits; valid until the call after the next."""
        tensors = [self._chunks.tensors.numbers[slab.info.name] for slab in batch]
        first, end = self._first[tensors], self._end[tensors]
        rows = ramps(first, end - first)
        start, stop = self._chunks.start[rows], self._chunks.stop[rows]
        at = 0
        for slab, count in zip(batch, (end - first).tolist(), strict=True):
            if slab.stop - slab.start < slab.info.numel:
                for place, row in enumerate(rows[at : at + count].tolist(), at):
                    before = partial(positions_before, self._chunks.box(row), slab.info.shape)
                    start[place] = max(start[place], before(slab.start))
                    stop[place] = min(stop[place], before(slab.stop))
            at += count
        kept = np.flatnonzero(start < stop)
        if not len(kept):  # all of it is other shards'
            return []
        wanted = replace(self._chunks.take(rows[kept]), start=start[kept], stop=stop[kept])
        areas, addresses = self._place(self._owners[rows[kept]], wanted.size_bytes)
        self._source.read(wanted, addresses)
        return areas

    def _place(self, owners: Ints, sizes: Ints) -> tuple[list[BatchArea], Columns]:
        """One area a file in a free arena, and the address of each chunk: chunks of a file follow each other."""
        numbers = np.unique(owners).tolist()
        added = np.bincount(owners, weights=sizes, minlength=len(self._targets)).astype(np.int64)
        waiting = {n: self._targets[n].position - self._targets[n].flushed for n in numbers}
        spans = [-(-(waiting[n] + int(added[n])) // PAGE_BYTES) * PAGE_BYTES for n in numbers]
        self._arenas.reverse()
        if len(self._arenas[0]) < sum(spans):
            self._arenas[0] = mmap.mmap(-1, sum(spans))
        arena = np.frombuffer(self._arenas[0], np.uint8)
        areas, next_address = [], np.zeros(len(self._targets), np.int64)
        at = 0
        for n, span in zip(numbers, spans, strict=True):
            target = self._targets[n]
            areas.append(BatchArea(target, arena[at : at + waiting[n] + int(added[n])], waiting[n]))
            next_address[n] = arena.ctypes.data + at + waiting[n]
            target.position += int(added[n])
            whole = target.position == target.file.size_bytes
            target.flushed = target.position if whole else target.position // GRANULE_BYTES * GRANULE_BYTES
            at += span
        order = np.argsort(owners, kind="stable")
        ends = np.cumsum(sizes[order])
        first_of_owner = np.searchsorted(owners[order], owners[order], "left")
        before = (ends - sizes[order]) - (ends - sizes[order])[first_of_owner]
        addresses = np.empty(len(owners), np.uint64)
        addresses[order] = next_address[owners[order]] + before
        return areas, addresses


class FileWriter:
    """Appends areas to the target files, several files at a time, and finishes each file that is complete."""

    def __init__(self, storage: Storage, folder: str, num_threads: int) -> None:
        self._storage = storage
        self._folder = folder
        self._num_threads = num_threads

    def append(self, areas: list[BatchArea]) -> int:
        """Write areas; returns the number of new bytes."""
        with ThreadPoolExecutor(self._num_threads) as pool:
            for _ in pool.map(self._append, areas):
                pass
        return sum(len(area.memory) - area.num_waiting for area in areas)

    def finish(self, targets: Iterable[TargetFile]) -> None:
        """Write the files that hold no elements: a header alone."""
        for target in targets:
            if target.part is None:
                assert target.position == target.file.size_bytes, f"{target.keys[0]} is incomplete"
                self._write(target, target.waiting)

    def abort(self, targets: Iterable[TargetFile]) -> None:
        """Close what is open."""
        for target in targets:
            if target.writer is not None:
                target.writer.abort()

    def _append(self, area: BatchArea) -> None:
        assert len(area.target.waiting) == area.num_waiting, "areas are written in the order they were loaded"
        area.memory[: area.num_waiting] = area.target.waiting
        self._write(area.target, area.memory)

    def _write(self, target: TargetFile, memory: Bytes) -> None:
        if target.writer is None:
            key, sums = f"{self._folder}/{target.keys[0]}", target.file.new_sums()
            target.writer = open_writer(self._storage, key, target.file.size_bytes, sums=sums)
            target.sums = sums.values
        written = sum(map(len, target.checksums)) * GRANULE_BYTES
        is_last = written + len(memory) == target.file.size_bytes
        size = len(memory) if is_last else len(memory) // GRANULE_BYTES * GRANULE_BYTES
        target.waiting = memory[size:].copy()
        if size:
            target.checksums.append(target.writer.write([(memory.ctypes.data, size)]))
        if is_last:
            target.writer.close()
            target.writer = None
            index = target.file.index(np.concatenate(target.checksums), target.sums).to_bytes()
            self._storage.write(f"{self._folder}/{target.keys[1]}", index)
            target.part = target.part_of(index)


def _by_tensor(targets: list[TargetFile], tensors: TensorColumns) -> tuple[ChunkTable, Ints]:
    """All chunks of the target files over a table, sorted by tensor, then in file order; and the file of each."""
    tables = [
        chunks.renumbered(tensors, np.array([tensors.numbers[name] for name in chunks.names], np.int64))
        for chunks in (target.file.chunks for target in targets)
    ]
    chunks = ChunkTable.concatenate(tables)
    order = np.argsort(chunks.tensor, kind="stable")
    owners = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    return chunks.take(order), owners[order]
