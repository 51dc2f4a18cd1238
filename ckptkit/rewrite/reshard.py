"""Reshard: rewrite a checkpoint for another layout, from the root's tensor table and placements alone.

One pass over all tensors in storage order: the elements of a slab are read once, in ascending order of every source
file, and appended to the file of each target rank that holds them, since its chunks stand in the same order. The next
slab is read while the last one is written. Memory: two slabs, one granule of each open file, the writers' buffers, and
some 400 bytes for each chunk of source and target.
"""

import contextlib
import mmap
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from ckptkit.format.data_file import DataFile
from ckptkit.format.keys import part_keys, step_folder
from ckptkit.format.root import Part, Root
from ckptkit.io.blocks import GRANULE_BYTES, Bytes, Columns, xxh3_64
from ckptkit.io.data_files import DataWriter, open_writer
from ckptkit.io.striping import Striper
from ckptkit.loading.reader import CheckpointReader
from ckptkit.loading.roots import committed_attempt, read_root, root_info, root_key
from ckptkit.model.chunk_table import ChunkTable, Ints, TensorColumns, ramps
from ckptkit.model.layout import ParallelLayout
from ckptkit.model.ranks import Partition
from ckptkit.model.slab import SLAB_BYTES, Slab, positions_before, slab_batches
from ckptkit.plan.save_plan import plan_files
from ckptkit.rewrite.room import refuse_full
from ckptkit.writer.commit import NotCommitted, commit_root
from threefold.cli import log
from threefold.errors import StorageError, UserError
from threefold.storage import AlreadyExists, Storage
from threefold.storage.local import sync_name

PAGE_BYTES = 4096
ATTEMPT = "reshard"  # how the names of its attempts begin
MAX_RANKS = 1 << 17  # each has a file
UPLOAD_MEMORY_BYTES = 256 << 20  # for all uploads at once, where the target is an object store


@dataclass(frozen=True)
class ReshardReport:
    """What a reshard did, or would do; bytes_needed are those of all elements, bytes_read are read from data files."""

    url: str
    step: int
    source_layout: str
    target_layout: str
    num_files: int
    bytes_needed: int
    bytes_read: int
    bytes_written: int
    seconds: float
    dry_run: bool = False


@dataclass(eq=False)
class _TargetFile:
    """One data file of a target rank while it is written."""

    keys: tuple[str, str]
    file: DataFile
    position: int = 0  # file bytes that the loader has placed
    flushed: int = 0  # of these, those that went to the writer; the rest waits in `waiting`
    waiting: Bytes = field(default_factory=lambda: np.empty(0, np.uint8))
    writer: DataWriter | None = None
    checksums: list[Columns] = field(default_factory=list)
    part: Part | None = None


@dataclass(frozen=True)
class _Area:
    """The bytes of one batch for one file: room for what waits, then the new bytes, contiguous and page-aligned."""

    target: _TargetFile
    memory: Bytes
    num_waiting: int


def reshard(
    source: CheckpointReader,
    storage: Storage,
    layout: ParallelLayout,
    *,
    step: int | None = None,
    attempt: str = "",
    slab_bytes: int = SLAB_BYTES,
    progress: Callable[[int, int], None] = lambda done, total: None,
    dry_run: bool = False,
) -> ReshardReport:
    """Write `source` into `storage` as the ranks of `layout` would have saved it, and commit it.

    UserError where the layout does not divide or another step is there; one that the same call made is kept. On a
    failure nothing is committed and what was written is removed, unless it is not known whether the root was put.
    `progress` is called with the bytes done and the total. With `dry_run` all is checked and planned, but no data read
    and nothing written. A caller whose `attempt` follows from all that it writes makes the same files in every try; a
    reshard's own is new each time.
    """
    started = time.monotonic()
    root, step = source.root, source.root.step if step is None else step
    attempt = attempt or f"{ATTEMPT}-{secrets.token_hex(6)}"
    wanted = replace(root, step=step, layout=layout, attempt=attempt, share=None)
    _check(replace(wanted, share=root.share), source.url)
    made = _made_before(storage, wanted)
    needed = read = written = 0
    if made is not None:
        num_files = len(made.parts)
    else:
        partition = Partition(list(wanted.tensors.values()), wanted.num_layers, layout)
        needed = read = sum(info.size_bytes for info in partition.tensors)
        targets = _target_files(partition, layout, wanted.attempt)
        num_files, written = len(targets), sum(target.file.size_bytes for target in targets)
        refuse_full(storage, written)
        if not dry_run:
            batches = slab_batches(partition.tensors, slab_bytes)
            _rewrite(source, storage, wanted, targets, batches, lambda done: progress(done, needed))
            read = source.bytes_read
    return ReshardReport(
        f"{storage.url}/{step_folder(step)}", step, str(root.layout), str(layout), num_files,
        needed, read, written, time.monotonic() - started, dry_run,
    )  # fmt: skip


def _check(wanted: Root, url: str) -> None:
    """Raise UserError if a source, with another step and layout, cannot be made into a checkpoint."""
    replace(wanted, tensors={}).check()  # the tensors were checked as they were read
    wanted.check_whole(url)
    num_ranks = wanted.layout.world_size
    if num_ranks > MAX_RANKS:
        text = f"{wanted.layout} has {num_ranks:,} ranks, which is more files than the {MAX_RANKS:,} that are written"
        raise UserError(text, hint="a run reads any layout: fewer ranks do")


def _made_before(storage: Storage, wanted: Root) -> Root | None:
    """Return what an earlier call made of the same save, None if the step is not there; else UserError."""
    if root_info(storage, wanted.step) is None:
        return None
    there = read_root(storage, wanted.step)
    if not _is_reshard_of(there, wanted):
        raise UserError(
            f"{storage.url} already holds step {wanted.step}", hint="choose another place, or remove that step first"
        )
    sync_name(storage, root_key(wanted.step))
    return there


def _rewrite(
    source: CheckpointReader, storage: Storage, wanted: Root, targets: list[_TargetFile],
    batches: Iterator[list[Slab]], progress: Callable[[int], None],
) -> None:  # fmt: skip
    """Write the files of all target ranks and commit them; on a failure remove what was written."""
    folder = step_folder(wanted.step)
    largest = max(target.file.size_bytes for target in targets)
    striper = Striper(warn=lambda text: log(f"warning: {text}"))
    striper.prepare(storage, f"{folder}/{targets[0].keys[0]}", largest, len(targets))
    writer = _Writer(storage, folder, source.num_threads)
    loader = _Loader(source, targets)
    is_committing = False
    try:
        done = 0
        with ThreadPoolExecutor(1) as ahead:
            loading = [ahead.submit(loader.load, batch) for batch in [next(batches, [])]]
            while loading:
                areas = loading.pop().result()
                batch = next(batches, None)
                if batch is not None:
                    loading.append(ahead.submit(loader.load, batch))
                done += writer.append(areas)
                progress(done)
        writer.finish(targets)
        is_committing = True
        commit_root(storage, replace(wanted, parts=_parts(targets)))
    except BaseException as error:
        writer.abort(targets)
        if not is_committing or isinstance(error, AlreadyExists | NotCommitted):  # else the root may be there
            with contextlib.suppress(StorageError):  # the first failure is the one to report
                if committed_attempt(storage, wanted.step) != wanted.attempt:  # by the same call, elsewhere
                    storage.delete(list(storage.list_keys(f"{folder}/{wanted.attempt}/")))
        raise


def _is_reshard_of(there: Root, wanted: Root) -> bool:
    """Return whether a committed step is what an earlier call made of the same save."""
    is_reshard = there.attempt.startswith(f"{ATTEMPT}-") and there.saved is not None
    same = replace(wanted, attempt=there.attempt, parts=there.parts, share=there.share)
    return (is_reshard or there.attempt == wanted.attempt) and there == same


def _target_files(partition: Partition, layout: ParallelLayout, attempt: str) -> list[_TargetFile]:
    """Return the files of all target ranks, writer n being rank n."""
    files = []
    for rank in range(layout.world_size):
        chunks = partition.table(layout.coords(rank))
        plan = plan_files(chunks, np.arange(len(chunks)))
        files += [_TargetFile(part_keys(attempt, rank, n), file) for n, file in enumerate(plan.files)]
    return files


class _Loader:
    """Reads batches of slabs into areas, one an affected target file. Two arenas alternate."""

    def __init__(self, source: CheckpointReader, targets: list[_TargetFile]) -> None:
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

    def load(self, batch: list[Slab]) -> list[_Area]:
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
        wanted = replace(self._chunks.take(rows[kept]), start=start[kept], stop=stop[kept])
        areas, addresses = self._place(self._owners[rows[kept]], wanted.size_bytes)
        self._source.read(wanted, addresses)
        return areas

    def _place(self, owners: Ints, sizes: Ints) -> tuple[list[_Area], Columns]:
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
            areas.append(_Area(target, arena[at : at + waiting[n] + int(added[n])], waiting[n]))
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


class _Writer:
    """Appends areas to the target files, several files at a time, and finishes each file that is complete."""

    def __init__(self, storage: Storage, folder: str, num_threads: int) -> None:
        self._storage = storage
        self._folder = folder
        self._num_threads = num_threads

    def append(self, areas: list[_Area]) -> int:
        """Write areas; returns the number of new bytes."""
        with ThreadPoolExecutor(self._num_threads) as pool:
            for _ in pool.map(self._append, areas):
                pass
        return sum(len(area.memory) - area.num_waiting for area in areas)

    def finish(self, targets: Iterable[_TargetFile]) -> None:
        """Write the files that hold no elements: a header alone."""
        for target in targets:
            if target.part is None:
                assert target.position == target.file.size_bytes, f"{target.keys[0]} is incomplete"
                self._write(target, target.waiting)

    def abort(self, targets: Iterable[_TargetFile]) -> None:
        """Close what is open."""
        for target in targets:
            if target.writer is not None:
                target.writer.abort()

    def _append(self, area: _Area) -> None:
        assert len(area.target.waiting) == area.num_waiting, "areas are written in the order they were loaded"
        area.memory[: area.num_waiting] = area.target.waiting
        self._write(area.target, area.memory)

    def _write(self, target: _TargetFile, memory: Bytes) -> None:
        if target.writer is None:
            target.writer = open_writer(self._storage, f"{self._folder}/{target.keys[0]}", target.file.size_bytes)
        written = sum(map(len, target.checksums)) * GRANULE_BYTES
        is_last = written + len(memory) == target.file.size_bytes
        size = len(memory) if is_last else len(memory) // GRANULE_BYTES * GRANULE_BYTES
        target.waiting = memory[size:].copy()
        if size:
            target.checksums.append(target.writer.write([(memory.ctypes.data, size)]))
        if is_last:
            target.writer.close()
            target.writer = None
            index = target.file.index(np.concatenate(target.checksums)).to_bytes()
            self._storage.write(f"{self._folder}/{target.keys[1]}", index)
            target.part = Part(target.keys[0], target.file.size_bytes, target.keys[1], len(index), xxh3_64(index))


def _by_tensor(targets: list[_TargetFile], tensors: TensorColumns) -> tuple[ChunkTable, Ints]:
    """All chunks of the target files over a table, sorted by tensor, then in file order; and the file of each."""
    tables = [
        chunks.renumbered(tensors, np.array([tensors.numbers[name] for name in chunks.names], np.int64))
        for chunks in (target.file.chunks for target in targets)
    ]
    chunks = ChunkTable.concatenate(tables)
    order = np.argsort(chunks.tensor, kind="stable")
    owners = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    return chunks.take(order), owners[order]


def _parts(targets: list[_TargetFile]) -> tuple[Part, ...]:
    parts = [target.part for target in targets if target.part is not None]
    assert len(parts) == len(targets), "every file is finished"
    return tuple(parts)
