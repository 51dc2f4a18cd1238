"""CheckpointReader: one committed checkpoint open for planned, verified reads, whatever storage holds it.

Every byte handed out was verified against the checksum of its granule. Reads that ascend in each data file over several
calls (all passes in storage order do) read every granule once.
"""

import hashlib
import os
import resource
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from ckptkit.format.keys import ROOT_KEY, step_folder
from ckptkit.format.part_index import PartIndex
from ckptkit.format.root import Part, Root
from ckptkit.io.blocks import GRANULE_BYTES, Columns, DamagedGranule, SumPlaces, shown_names, xxh3_64
from ckptkit.io.data_files import DataReader, open_reader
from ckptkit.loading.exchange import Alone, Exchange, on_all
from ckptkit.loading.index_files import MAX_GROUP_BYTES, index_files
from ckptkit.loading.roots import committed_attempt, is_medium_error, latest_step, read_root
from ckptkit.loading.sharing import Line, Runs
from ckptkit.model.chunk_table import ChunkTable, Ints, TensorColumns
from ckptkit.model.layout import ParallelLayout
from ckptkit.plan.load_plan import LoadPlan, plan_load
from ckptkit.plan.stored import Bounds, PartJoin, StoredChunks
from threefold.closing import Closing
from threefold.errors import CheckFailed, StorageError, quoted
from threefold.storage import Storage
from threefold.storage.second_look import read_checked

# each keeps a granule and two descriptors, and two checkpoints may be open
MAX_OPEN_FILES = max(4, min(128, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8))


class CheckpointReader(Closing):
    """Root, part indexes and data of one step; use it in a `with`.

    `num_threads` bounds the threads that read data, by default `usual_threads`. The part indexes are read on first use.
    The ranks of an `exchange` open a checkpoint together and plan together: root and part indexes are then read by one
    of them each. `root` is given where it is known and not there yet.
    """

    can_sum: ClassVar[bool] = True  # whether `fetch` sums what it reads, to be compared with a certificate

    def __init__(
        self, storage: Storage, step: int, *, num_threads: int | None = None, exchange: Exchange | None = None,
        root: Root | None = None,
    ) -> None:  # fmt: skip
        self.storage = storage
        self.folder = step_folder(step)
        self.url = f"{storage.url}/{self.folder}"
        self.num_threads = num_threads or usual_threads()
        self.exchange = exchange or Alone()
        self.root = root or read_root(storage, step, self.exchange)
        self._was_committed = root is None
        self.is_given_up = False  # reads that other threads begin fail
        self._all_chunks: StoredChunks | None = None
        self._known: dict[bytes, TensorColumns] = {}
        self._checksums: dict[int, Columns] = {}
        self._open: OrderedDict[int, DataReader] = OrderedDict()  # the one used last is the last
        self._uses, self._opening = Counter[int](), threading.Lock()
        self._closed_bytes_read = 0

    @cached_property
    def stored(self) -> StoredChunks:
        """All chunks of the checkpoint: some 80 bytes each are held, thrice that while the part indexes are joined."""
        return self._join(None)

    def plan(self, wanted: ChunkTable) -> LoadPlan:
        """Return the copies that fill wanted chunks; holds no more of the part indexes than may meet them."""
        stored = self._chunks_for(wanted)
        return on_all(self.exchange, lambda: self._planned(wanted, stored))

    def _chunks_for(self, wanted: ChunkTable) -> StoredChunks:
        """Return the stored chunks that wanted ones may meet; where there are few, all, for the next plan too."""
        if sum(part.index_bytes for part in self.root.parts) > MAX_GROUP_BYTES:
            return self._join(Bounds.of(wanted, TensorColumns.of(list(self.root.tensors.values()))))
        if self._all_chunks is None:  # no cached_property: its lock is one of all threads, which may be ranks
            self._all_chunks = self._join(None)
        return self._all_chunks

    @property
    def identity(self) -> bytes:
        """What all that is read follows from."""
        return self.root.to_bytes()

    def attempt_for(self, layout: ParallelLayout) -> str:
        """Return the attempt that writes this checkpoint for a layout: equal in every try, on every machine."""
        return f"reshard-{hashlib.sha256(self.identity + str(layout).encode()).hexdigest()[:16]}"

    @property
    def bytes_read(self) -> int:
        """Bytes of data files read so far."""
        return self._closed_bytes_read + sum(source.bytes_read for source in self._open.values())

    def read_index(self, part: Part) -> PartIndex:
        """One part index, verified against the root."""
        return self._parsed(part, self.index_file(part))

    def read(self, wanted: ChunkTable, targets: Sequence[int] | Columns) -> None:
        """Fill memory with wanted chunks, each at its target address; CheckFailed where data is missing or damaged."""
        self.execute(self._planned(wanted, self.stored), targets)

    def check_read(self) -> int:
        """Return how many tensors this reader itself compared with the certificate of their save."""
        return 0

    def execute(self, plan: LoadPlan, targets: Sequence[int] | Columns) -> None:
        """Make the copies of a plan; `targets` are the addresses of the wanted chunks."""
        self.fetch(plan, np.asarray(targets, np.uint64).astype(np.int64)[plan.wanted] + plan.target)

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
        for begin in range(0, len(spans), MAX_OPEN_FILES):
            group = spans[begin : begin + MAX_OPEN_FILES]
            threads_each = max(num_threads // len(group), 1)

            def read(span: tuple[int, slice], num_threads: int = threads_each) -> None:
                number, own = span
                with self._opened(number) as source:
                    self.read_part(number, source, rows[own], num_threads, sums and sums.take(own))

            if len(group) == 1:
                read(group[0])
                continue
            with ThreadPoolExecutor(min(num_threads, len(group))) as pool:
                for _ in pool.map(read, group):
                    pass

    def open_part(self, number: int, expected: Columns | None, *, from_cache: bool = False) -> DataReader:
        """Open one data file, which the caller closes; unverified if `expected` is None.

        Without `from_cache` the disk is read, whatever the page cache has.
        """
        part = self.root.parts[number]
        key = f"{self.folder}/{part.data}"
        return open_reader(self.storage_of(part.data), key, part.data_bytes, expected, from_cache=from_cache)

    def read_part(
        self, number: int, source: DataReader, rows: npt.ArrayLike, num_threads: int = 1, sums: SumPlaces | None = None
    ) -> None:
        """Fill memory from rows of (offset, bytes, address) of a data file that `open_part` opened, sorted by offset.

        CheckFailed names the tensors of damage, or says that the file is not what it should be.
        """
        if self.is_given_up:
            raise StorageError(f"reading {self.url} was given up")
        part = self.root.parts[number]
        name = self.name_of(part.data)
        try:
            with self.loss_as_damage(part.data, part.data_bytes, part):
                source.read(rows, num_threads=num_threads, sums=sums)
        except DamagedGranule as damage:
            start = damage.granule * GRANULE_BYTES
            tensors = self.read_index(part).tensors_between(start, start + GRANULE_BYTES)
            raise DamagedGranule(name, damage.granule, tensors) from None

    def size_faults(self) -> dict[str, str]:
        """Return what is wrong with the sizes of files that the root names, by key; one listing, nothing is read."""
        sizes = {item.key: item.size_bytes for item in self.storage.list(f"{self.folder}/{self.root.attempt}/")}
        named = [
            pair for part in self.root.parts for pair in ((part.data, part.data_bytes), (part.index, part.index_bytes))
        ]
        faults = {key: _size_fault(sizes.get(f"{self.folder}/{key}"), num_bytes) for key, num_bytes in named}
        return {key: fault for key, fault in faults.items() if fault}

    def close(self) -> None:
        """Close all files."""
        for number in list(self._open):
            self._close(number)

    def _planned(self, wanted: ChunkTable, stored: StoredChunks) -> LoadPlan:
        try:
            return plan_load(wanted, stored)
        except CheckFailed as error:
            raise CheckFailed(f"{self.url} is not whole: {error.message}") from None

    def _join(self, bounds: Bounds | None) -> StoredChunks:
        """Return the chunks of all part indexes, and on the way the checksums of all granules."""
        join = PartJoin(list(self.root.tensors.values()), bounds)
        joined = []
        for number, index in enumerate(self.read_indexes()):
            self._checksums[number] = index.checksums
            joined.append(join.of(number, index, self.name_of(self.root.parts[number].index)))
        return join.joined(joined)

    def read_indexes(self) -> Iterator[PartIndex]:
        """Yield all part indexes, of which each is read by one rank of the exchange; all of them call this."""
        files = index_files(self.root.parts, self.exchange, self.index_file, self.ranks_that_read)
        for part, data in zip(self.root.parts, files, strict=True):
            yield self._parsed(part, data)

    def ranks_that_read(self, number: int) -> range:
        """Return which ranks of the exchange can read the files of a part."""
        return range(self.exchange.size)

    def readable(self, line: Line) -> list[Runs] | None:
        """Return what each rank of the exchange can read of the line of data files; None if each can read all."""
        return None

    def storage_of(self, key: str) -> Storage:
        """Return where a file of the step is, by its key in the step's folder."""
        return self.storage

    def name_of(self, key: str) -> str:
        """Return the name of a file of the step for messages."""
        return f"{self.url}/{key}"

    def index_file(self, part: Part) -> bytes:
        """One index file, verified against the root."""
        name = self.name_of(part.index)

        def read(storage: Storage) -> bytes:
            data = bytes(storage.read_ranges(f"{self.folder}/{part.index}", [(0, part.index_bytes)])[0])
            if xxh3_64(data) != part.index_xxh3:
                raise CheckFailed(f"{name} is damaged: its checksum is not the one in {ROOT_KEY}")
            return data

        with self.loss_as_damage(part.index, part.index_bytes):
            return read_checked(self.storage_of(part.index), name, read)

    def _parsed(self, part: Part, data: bytes) -> PartIndex:
        where = self.name_of(part.index)
        index = PartIndex.from_bytes(data, where, self._known)
        if index.size_bytes != part.data_bytes:
            raise CheckFailed(f"{where} describes {index.size_bytes} bytes, {ROOT_KEY} {part.data_bytes}")
        return index

    @contextmanager
    def _opened(self, number: int) -> Iterator[DataReader]:
        """Yield the open data file of a part; up to MAX_OPEN_FILES stay open, and more while they are in use."""
        with self._opening:
            if number not in self._open:
                idle = [each for each in self._open if not self._uses[each]]
                for each in idle[: max(len(self._open) - MAX_OPEN_FILES + 1, 0)]:
                    self._close(each)
                part = self.root.parts[number]
                with self.loss_as_damage(part.data, part.data_bytes, part):
                    self._open[number] = self.open_part(number, self._checksums[number], from_cache=True)
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

    @contextmanager
    def loss_as_damage(self, key: str, num_bytes: int, part: Part | None = None) -> Iterator[None]:
        """CheckFailed where reading fails since a file is gone, cut short or on a bad disk, not since a server is away.

        `part` is the one whose data file is read: its tensors are then named.
        """
        try:
            yield
        except CheckFailed:
            raise
        except StorageError as error:
            if is_medium_error(error):
                fault = "cannot be read (Input/output error)"
            else:
                info = self.storage_of(key).info(f"{self.folder}/{key}")
                fault = _size_fault(info.size_bytes if info else None, num_bytes)
            if not fault:
                raise
            self.check_still_there()
            names = self.read_index(part).tensors_between(0, part.data_bytes) if part else ()
            held = f", where {shown_names(names)} is stored" if names else ""
            raise CheckFailed(f"{self.name_of(key)} {fault}{held}") from error

    def check_still_there(self) -> None:
        """StorageError where the step was pruned, so that its files are missing; it may have been saved again since."""
        if self._was_committed and committed_attempt(self.storage, self.root.step) != self.root.attempt:
            newest = latest_step(self.storage)
            run = self.storage.url
            raise StorageError(
                f"step {self.root.step} of {run} was pruned while it was read",
                hint=f"ckptkit ls {quoted(run)}"
                if newest is None
                else f"read the newest one: {run}/{step_folder(newest)}",
            )


def _size_fault(found: int | None, num_bytes: int) -> str:
    """Return what is wrong with a file of so many bytes, None if it is missing; empty if nothing is."""
    if found is None:
        return "is missing"
    return "" if found == num_bytes else f"has {found} bytes, not {num_bytes}"


def usual_threads() -> int:
    """Return how many threads a rank reads with: its share of the host's cores, at least 4 and at most 16."""
    num_ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    share = len(os.sched_getaffinity(0)) // max(int(num_ranks) if num_ranks.isdecimal() else 1, 1)
    return min(max(share, 4), 16)


@contextmanager
def reading_threads(num_threads: int, *readers: CheckpointReader) -> Iterator[ThreadPoolExecutor]:
    """Threads that are not waited for, but for their read under way, where an error or a Ctrl-C ends the block."""
    pool = ThreadPoolExecutor(num_threads)
    try:
        yield pool
    except BaseException:
        for reader in readers:
            reader.is_given_up = True
        raise
    finally:
        pool.shutdown()
        for reader in readers:
            reader.is_given_up = False
