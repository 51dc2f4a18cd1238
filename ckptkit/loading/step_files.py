"""StepFiles: the files that the root of one step names, on any storage; what verify and copy need beside a reader.

Part indexes are verified against the root; each is read by one rank of those that open the step together, some ahead.
A file that is gone, cut short or on a bad disk is damage, and a server that is away is not.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol

import numpy.typing as npt

from ckptkit.format.keys import ROOT_KEY, step_folder
from ckptkit.format.part_index import PartIndex
from ckptkit.format.root import Part, Root
from ckptkit.io.blocks import GRANULE_BYTES, Columns, DamagedGranule, SumPlaces, shown_names, xxh3_64
from ckptkit.io.data_files import DataReader, open_reader
from ckptkit.loading.exchange import Exchange, agreed
from ckptkit.loading.roots import committed_attempt, is_medium_error, latest_step
from ckptkit.loading.sharing import Line, Runs
from ckptkit.model.chunk_table import TensorColumns
from threefold.errors import CheckFailed, StorageError, quoted
from threefold.storage import Storage
from threefold.storage.second_look import read_checked

NUM_INDEX_THREADS, INDEX_GROUP = 8, 4  # threads that read index files, files that each reads one after the other
MAX_GROUP_BYTES = 16 << 20


class FilePlaces(Protocol):
    """Where the files of a step are, and which ranks of an exchange read them there."""

    url: str  # of the step

    def storage_of(self, key: str) -> Storage:
        """Return where a file of the step is, by its key in the step's folder."""

    def name_of(self, key: str) -> str:
        """Return the name of a file of the step for messages."""

    def ranks_that_read(self, number: int) -> range:
        """Return which ranks of the exchange can read the files of a part."""

    def readable(self, line: Line) -> list[Runs] | None:
        """Return what each rank of the exchange can read of the line of data files; None if each can read all."""

    def note_lost(self, key: str) -> None:
        """Take note of a file that could not be read."""


class OnePlace:
    """All files of a step in one folder, which every rank of an exchange reads."""

    def __init__(self, storage: Storage, step: int, num_ranks: int) -> None:
        self.url = f"{storage.url}/{step_folder(step)}"
        self._storage, self._ranks = storage, range(num_ranks)

    def storage_of(self, key: str) -> Storage:
        return self._storage

    def name_of(self, key: str) -> str:
        return f"{self.url}/{key}"

    def ranks_that_read(self, number: int) -> range:
        return self._ranks

    def readable(self, line: Line) -> list[Runs] | None:
        return None

    def note_lost(self, key: str) -> None:
        """Do nothing, as no other copy is known."""


class StepFiles:
    """The files of one step; the ranks of an `exchange` read its part indexes together.

    `was_committed` says that the root was read from the storage, so that lost files may be those of a pruned step.
    """

    def __init__(
        self, storage: Storage, root: Root, exchange: Exchange, places: FilePlaces, *, was_committed: bool
    ) -> None:  # fmt: skip
        self.storage, self.root, self.exchange, self.places = storage, root, exchange, places
        self.folder, self.url = step_folder(root.step), places.url
        self.is_given_up = False  # reads that other threads begin fail
        self._was_committed = was_committed
        self._known: dict[bytes, TensorColumns] = {}
        self._indexes: list[PartIndex] | None = None

    def read_index(self, part: Part) -> PartIndex:
        """Return one part index, verified against the root."""
        return self._parsed(part, self.index_file(part))

    def read_indexes(self) -> Iterator[PartIndex]:
        """Yield all part indexes, of which each is read by one rank of the exchange; all of them call this."""
        return self._read_indexes() if self._indexes is None else iter(self._indexes)

    def keep_indexes(self) -> None:
        """Read all part indexes for all later calls, if they are few bytes; all ranks of the exchange call this."""
        if sum(part.index_bytes for part in self.root.parts) <= MAX_GROUP_BYTES:
            self._indexes = list(self.read_indexes())

    def index_file(self, part: Part) -> bytes:
        """Return one index file, verified against the root."""
        name = self.places.name_of(part.index)

        def read(storage: Storage) -> bytes:
            data = bytes(storage.read_ranges(f"{self.folder}/{part.index}", [(0, part.index_bytes)])[0])
            if xxh3_64(data) != part.index_xxh3:
                raise CheckFailed(f"{name} is damaged: its checksum is not the one in {ROOT_KEY}")
            return data

        with self.loss_as_damage(part.index, part.index_bytes):
            return read_checked(self.places.storage_of(part.index), name, read)

    def open_part(self, number: int, expected: Columns | None, *, from_cache: bool = False) -> DataReader:
        """Open one data file, which the caller closes; unverified if `expected` is None.

        Without `from_cache` the disk is read, whatever the page cache has.
        """
        part = self.root.parts[number]
        key, storage = f"{self.folder}/{part.data}", self.places.storage_of(part.data)
        return open_reader(storage, key, part.data_bytes, expected, from_cache=from_cache)

    def read_part(
        self, number: int, source: DataReader, rows: npt.ArrayLike, num_threads: int = 1, sums: SumPlaces | None = None
    ) -> None:
        """Fill memory from rows of (offset, bytes, address) of a data file that `open_part` opened, sorted by offset.

        CheckFailed names the tensors of damage, or says that the file is not what it should be.
        """
        if self.is_given_up:
            raise StorageError(f"reading {self.url} was given up")
        part = self.root.parts[number]
        name = self.places.name_of(part.data)
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

    @contextmanager
    def loss_as_damage(self, key: str, num_bytes: int, part: Part | None = None) -> Iterator[None]:
        """CheckFailed where reading fails since a file is gone, cut short or on a bad disk, not since a server is away.

        `part` is the one whose data file is read: its tensors are then named.
        """
        try:
            try:
                yield
            except StorageError as error:
                self._raise_if_lost(error, key, num_bytes, part)
                raise
        except CheckFailed:
            self.places.note_lost(key)
            raise

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

    def _raise_if_lost(self, error: StorageError, key: str, num_bytes: int, part: Part | None) -> None:
        """Raise CheckFailed if a file that could not be read is lost, StorageError if its step was pruned."""
        if is_medium_error(error):
            fault = "cannot be read (Input/output error)"
        else:
            info = self.places.storage_of(key).info(f"{self.folder}/{key}")
            fault = _size_fault(info.size_bytes if info else None, num_bytes)
        if not fault:
            return
        self.check_still_there()
        names = self.read_index(part).tensors_between(0, part.data_bytes) if part else ()
        held = f", where {shown_names(names)} is stored" if names else ""
        raise CheckFailed(f"{self.places.name_of(key)} {fault}{held}") from error

    def _read_indexes(self) -> Iterator[PartIndex]:
        files = index_files(self.root.parts, self.exchange, self.index_file, self.places.ranks_that_read)
        for part, data in zip(self.root.parts, files, strict=True):
            yield self._parsed(part, data)

    def _parsed(self, part: Part, data: bytes) -> PartIndex:
        where = self.places.name_of(part.index)
        index = PartIndex.from_bytes(data, where, self._known)
        if index.size_bytes != part.data_bytes:
            raise CheckFailed(f"{where} describes {index.size_bytes} bytes, {ROOT_KEY} {part.data_bytes}")
        return index


def _size_fault(stored_bytes: int | None, num_bytes: int) -> str:
    """Return what is wrong with a file of so many bytes, None if it is missing; empty if nothing is."""
    if stored_bytes is None:
        return "is missing"
    return "" if stored_bytes == num_bytes else f"has {stored_bytes} bytes, not {num_bytes}"


def index_files(
    parts: Sequence[Part], exchange: Exchange, read: Callable[[Part], bytes], ranks_that_read: Callable[[int], range]
) -> Iterator[bytes]:
    """Yield the index files in the order of the parts; of those that can read one, by turns, one rank does."""
    rank, size = exchange.rank, exchange.size
    with ThreadPoolExecutor(NUM_INDEX_THREADS) as pool:

        def reader(number: int) -> int:
            ranks = ranks_that_read(number)
            return ranks[number % len(ranks)]

        def submit(group: range) -> Future[list[bytes]]:
            mine = [parts[number] for number in group if reader(number) == rank]
            return pool.submit(lambda: [read(part) for part in mine])

        groups = _groups(parts, INDEX_GROUP * size)
        ahead = deque(map(submit, groups[:NUM_INDEX_THREADS]))
        for turn, group in enumerate(groups):
            if turn + NUM_INDEX_THREADS < len(groups):
                ahead.append(submit(groups[turn + NUM_INDEX_THREADS]))
            reading = ahead.popleft()
            gathered = agreed(exchange, lambda: b"".join(reading.result()))  # noqa: B023  # called at once
            at = [0] * size
            for number in group:
                owner, num_bytes = reader(number), parts[number].index_bytes
                yield gathered[owner][at[owner] : at[owner] + num_bytes]
                at[owner] += num_bytes


def _groups(parts: Sequence[Part], most: int) -> list[range]:
    """Return the numbers of parts in their order, at most so many and MAX_GROUP_BYTES of index files at a time."""
    groups: list[range] = []
    room = 0
    for number, part in enumerate(parts):
        if not groups or len(groups[-1]) >= most or part.index_bytes > room:
            groups.append(range(number, number))
            room = MAX_GROUP_BYTES
        groups[-1] = range(groups[-1].start, number + 1)
        room -= part.index_bytes
    return groups
