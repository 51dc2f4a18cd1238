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
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np

from ckptkit.chunk_table import ChunkTable, Ints
from ckptkit.format.data_file import DataFile
from ckptkit.format.root import ROOT_KEY, Part, Root, part_keys, step_folder
from ckptkit.io.blocks import GRANULE_BYTES, Columns, xxh3_64
from ckptkit.io.part_sink import Bytes, PartSink, open_sink
from ckptkit.io.striping import Striper
from ckptkit.layout import ParallelLayout
from ckptkit.loading.reader import CheckpointReader
from ckptkit.partition import rank_chunks
from ckptkit.passes.slab import SLAB_BYTES, Slab, positions_before, slab_batches
from ckptkit.plan import plan_files
from ckptkit.saving.commit import NotCommitted, commit_root
from ckptkit.tensor import TensorInfo
from threefold.cli import log
from threefold.errors import StorageError, UserError
from threefold.storage import AlreadyExists, Storage

PAGE_BYTES = 4096
MAX_RANKS = 1 << 17  # each has a file
UPLOAD_MEMORY_BYTES = 256 << 20  # for all uploads at once, where the target is an object store


@dataclass(frozen=True)
class ReshardReport:
    """What a reshard did; bytes_needed are the bytes of all elements, bytes_read what was read of data files."""

    url: str
    step: int
    source_layout: str
    target_layout: str
    num_files: int
    bytes_needed: int
    bytes_read: int
    bytes_written: int
    seconds: float


@dataclass(eq=False)
class _TargetFile:
    """One data file of a target rank while it is written."""

    keys: tuple[str, str]
    file: DataFile
    position: int = 0  # file bytes that the loader has placed
    flushed: int = 0  # of these, those that went into the sink; the rest waits in `waiting`
    waiting: Bytes = field(default_factory=lambda: np.empty(0, np.uint8))
    sink: PartSink | None = None
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
    slab_bytes: int = SLAB_BYTES,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ReshardReport:
    """Write `source` into `storage` as the ranks of `layout` would have saved it, and commit it.

    UserError where the layout does not divide or the step is there already; on a failure nothing is committed and what
    was written is removed, unless it is not known whether the root was put. `progress` is told the bytes done and the
    total.
    """
    started = time.monotonic()
    root = source.root
    tensors = list(root.tensors.values())
    step = root.step if step is None else step
    replace(root, step=step).check()
    root.check_whole(source.url)
    if layout.cp * layout.ep * layout.virtual > 1:
        raise UserError(f"cannot reshard to {layout}: a checkpoint is cut by tp, dp and pp only")
    if layout.world_size > MAX_RANKS:
        text = f"{layout} has {layout.world_size:,} ranks, which is more files than the {MAX_RANKS:,} that are written"
        raise UserError(text, hint="a run reads any layout: fewer ranks do")
    attempt = f"reshard-{secrets.token_hex(6)}"
    folder = step_folder(step)
    if storage.info(f"{folder}/{ROOT_KEY}") is not None:
        raise UserError(
            f"{storage.url} already holds step {step}", hint="choose another place, or remove that step first"
        )
    targets = _target_files(tensors, root.num_layers, layout, attempt)
    needed = sum(info.size_bytes for info in tensors if info.placement.tied_to is None)
    largest = max(target.file.size_bytes for target in targets)
    striper = Striper(tell=lambda text: log(f"warning: {text}"))
    striper.prepare(storage, f"{folder}/{targets[0].keys[0]}", largest, len(targets))
    writer = _Writer(storage, folder, source.num_threads)
    loader = _Loader(source, targets, tensors)
    is_committing = False
    try:
        done = 0
        with ThreadPoolExecutor(1) as ahead:
            batches = slab_batches(tensors, slab_bytes)
            loading = [ahead.submit(loader.load, batch) for batch in [next(batches, [])]]
            while loading:
                areas = loading.pop().result()
                batch = next(batches, None)
                if batch is not None:
                    loading.append(ahead.submit(loader.load, batch))
                done += writer.append(areas)
                progress(done, needed)
        writer.finish(targets)
        made = Root(step, attempt, layout, root.num_layers, root.tensors, _parts(targets), root.metadata, root.saved)
        is_committing = True
        commit_root(storage, made)
    except BaseException as error:
        writer.abort(targets)
        if not is_committing or isinstance(error, AlreadyExists | NotCommitted):  # else the root may be there
            with contextlib.suppress(StorageError):  # the first failure is the one to report
                storage.delete(list(storage.list_keys(f"{folder}/{attempt}/")))
        raise
    written = sum(part.data_bytes for part in made.parts)
    return ReshardReport(
        f"{storage.url}/{folder}", step, str(root.layout), str(layout), len(made.parts), needed, source.bytes_read,
        written, time.monotonic() - started,
    )  # fmt: skip


def _target_files(
    tensors: list[TensorInfo], num_layers: int, layout: ParallelLayout, attempt: str
) -> list[_TargetFile]:
    """The files of all target ranks, writer n being rank n."""
    files = []
    for rank in range(layout.world_size):
        chunks = ChunkTable.of(rank_chunks(tensors, num_layers, layout, layout.coords(rank)))
        plan = plan_files(chunks, tensors)
        files += [_TargetFile(part_keys(attempt, rank, n), file) for n, file in enumerate(plan.files)]
    return files


class _Loader:
    """Reads batches of slabs into areas, one an affected target file. Two arenas alternate."""

    def __init__(self, source: CheckpointReader, targets: list[_TargetFile], tensors: list[TensorInfo]) -> None:
        self._source = source
        self._targets = targets
        self._infos = {info.name: info for info in tensors}
        self._rows = _rows_by_tensor(targets)
        self._arenas = [mmap.mmap(-1, PAGE_BYTES), mmap.mmap(-1, PAGE_BYTES)]
        for target in targets:
            target.waiting = np.frombuffer(target.file.header, np.uint8)
            target.position = len(target.file.header)

    def load(self, batch: list[Slab]) -> list[_Area]:
        """The areas of one batch, filled but for what waits; valid until the call after the next."""
        chunks, owners = [], []
        for slab in batch:
            for number, row in self._rows.get(slab.info.name, ()):
                table = self._targets[number].file.chunks
                box, first, last = table.box(row), int(table.start[row]), int(table.stop[row])
                start = max(first, positions_before(box, slab.info.shape, slab.start))
                stop = min(last, positions_before(box, slab.info.shape, slab.stop))
                if start < stop:
                    chunks.append((slab.info, box, start, stop))
                    owners.append(number)
        wanted = ChunkTable.of(chunks)
        areas, addresses = self._place(np.array(owners, np.int64), wanted.size_bytes)
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
            if target.sink is not None:
                target.sink.abort()

    def _append(self, area: _Area) -> None:
        assert len(area.target.waiting) == area.num_waiting, "areas are written in the order they were loaded"
        area.memory[: area.num_waiting] = area.target.waiting
        self._write(area.target, area.memory)

    def _write(self, target: _TargetFile, memory: Bytes) -> None:
        if target.sink is None:
            target.sink = open_sink(self._storage, f"{self._folder}/{target.keys[0]}", target.file.size_bytes)
        written = sum(map(len, target.checksums)) * GRANULE_BYTES
        is_last = written + len(memory) == target.file.size_bytes
        size = len(memory) if is_last else len(memory) // GRANULE_BYTES * GRANULE_BYTES
        target.waiting = memory[size:].copy()
        if size:
            target.checksums.append(target.sink.write(memory[:size]))
        if is_last:
            target.sink.close()
            target.sink = None
            index = target.file.index(np.concatenate(target.checksums)).to_bytes()
            self._storage.write(f"{self._folder}/{target.keys[1]}", index)
            target.part = Part(target.keys[0], target.file.size_bytes, target.keys[1], len(index), xxh3_64(index))


def _rows_by_tensor(targets: list[_TargetFile]) -> dict[str, list[tuple[int, int]]]:
    """(file number, row) of every chunk of each tensor, in file order."""
    rows: dict[str, list[tuple[int, int]]] = {}
    for number, target in enumerate(targets):
        for row, tensor in enumerate(target.file.chunks.tensor.tolist()):
            rows.setdefault(target.file.chunks.names[tensor], []).append((number, row))
    return rows


def _parts(targets: list[_TargetFile]) -> tuple[Part, ...]:
    parts = [target.part for target in targets if target.part is not None]
    assert len(parts) == len(targets), "every file is finished"
    return tuple(parts)
