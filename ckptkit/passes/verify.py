"""Verify: reads a checkpoint, all of it, a sample or its manifest alone, and names all damage, not only the first."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckptkit.chunk import Box
from ckptkit.chunk_table import ChunkTable
from ckptkit.format.data_file import MAX_CHUNKS, DataFile
from ckptkit.format.part_index import PartIndex
from ckptkit.format.root import Part
from ckptkit.io.blocks import GRANULE_BYTES, checksums, shown_names
from ckptkit.loading.reader import CheckpointReader, reading_threads
from ckptkit.plan import PartJoin, StoredChunks, plan_load
from threefold.errors import CheckFailed

WINDOW_BYTES = 16 << 20
Granules = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Fault:
    """One fault: the file, the byte offset and the tensors where they are known, and what is wrong."""

    file: str
    what: str
    offset: int | None = None
    tensors: tuple[str, ...] = ()

    def __str__(self) -> str:
        place = self.file if self.offset is None else f"{self.file} at byte {self.offset}"
        return f"{place}: {self.what}" + (f", in {shown_names(self.tensors)}" if self.tensors else "")


@dataclass(frozen=True)
class Verification:
    """What was read of the data files, of how many bytes in all, and what is wrong."""

    step: int
    num_files: int
    bytes_read: int
    data_bytes: int
    faults: tuple[Fault, ...]

    @property
    def ok(self) -> bool:
        return not self.faults


def verify_checkpoint(reader: CheckpointReader, *, share: float = 1.0, seed: int = 0) -> Verification:
    """Check every part index, every data file's size, that each tensor is held whole and once, and a share of the data.

    `share` 1 reads every granule of every data file, 0 none; anything between reads the first and the last granule of
    each file and others at random, the same for the same seed. StorageError where a file is there and cannot be read:
    that says nothing of what it holds.
    """
    assert 0 <= share <= 1, f"a share of {share}"
    with reading_threads(reader.num_threads, reader) as pool:
        checked = list(pool.map(lambda number: _check_part(reader, number, share, seed), range(len(reader.root.parts))))
    indexes = [index for index, _, _ in checked if index is not None]
    faults = [fault for _, _, found in checked for fault in found]
    if len(indexes) == len(checked):
        faults += _check_cover(reader, indexes)
    data_bytes = sum(part.data_bytes for part in reader.root.parts)
    return Verification(reader.root.step, len(checked), sum(read for _, read, _ in checked), data_bytes, tuple(faults))


def sampled_granules(num_granules: int, share: float, seed: Sequence[int]) -> Granules:
    """The granules of a file that a sample of it reads, ascending: the first, the last, and others at random."""
    chosen = np.random.default_rng(seed).random(num_granules) < share
    chosen[[0, -1]] = True
    return np.flatnonzero(chosen)


def check_data(
    reader: CheckpointReader, number: int, index: PartIndex, granules: Granules | None = None
) -> tuple[int, list[Fault]]:
    """The bytes read of a data file, all its granules or some, and the faults in them."""
    part, faults = reader.root.parts[number], list[Fault]()
    if len(index.chunks) > MAX_CHUNKS:
        return 0, [Fault(part.index, f"{len(index.chunks)} chunks, a file has at most {MAX_CHUNKS}")]
    header = DataFile.of(index.chunks).header
    if len(header) != index.data_offset:
        what = f"its index puts the data at byte {index.data_offset}, its chunks at {len(header)}"
        return 0, [Fault(part.data, what, 0)]
    try:
        with reader.loss_as_damage(part.data, part.data_bytes):
            source = reader.open_part(number, None)
    except CheckFailed as error:
        return 0, [_lost(part, index, error)]
    buffer = np.empty(WINDOW_BYTES, np.uint8)
    try:
        for first, stop in _stretches(np.arange(len(index.checksums)) if granules is None else granules):
            start = first * GRANULE_BYTES
            size = min(stop * GRANULE_BYTES, index.size_bytes) - start
            reader.read_part(number, source, [(start, size, buffer.ctypes.data)])
            found = checksums(buffer[:size])
            for granule in (first + np.flatnonzero(found != index.checksums[first:stop])).tolist():
                at = granule * GRANULE_BYTES
                held = index.tensors_between(at, at + GRANULE_BYTES)
                faults.append(Fault(part.data, "the 1 MiB from here does not have its checksum", at, held))
            same = min(max(len(header) - start, 0), size)
            if buffer[:same].tobytes() != header[start : start + same]:
                what = "its safetensors header is not the one that its index describes"
                faults.append(Fault(part.data, what, start))
    except CheckFailed as error:
        faults.append(_lost(part, index, error))
    finally:
        source.close()
    return source.bytes_read, faults


def _lost(part: Part, index: PartIndex, error: CheckFailed) -> Fault:
    """A data file that is not there as it should be, and all that it holds."""
    return Fault(part.data, error.message, None, index.tensors_between(0, index.size_bytes))


def _check_part(
    reader: CheckpointReader, number: int, share: float, seed: int
) -> tuple[PartIndex | None, int, list[Fault]]:
    part = reader.root.parts[number]
    try:
        index = reader.read_index(part)
    except CheckFailed as error:
        return None, 0, [Fault(part.index, error.message)]
    if share:
        granules = sampled_granules(len(index.checksums), share, (seed, number))
        return index, *check_data(reader, number, index, granules)
    try:
        reader.check_size(part)
    except CheckFailed as error:
        return index, 0, [_lost(part, index, error)]
    return index, 0, []


def _stretches(granules: Granules) -> Iterator[tuple[int, int]]:
    """Ascending granules as [first, stop) of neighbours, as many as the window holds."""
    most = WINDOW_BYTES // GRANULE_BYTES
    for run in np.split(granules, np.flatnonzero(np.diff(granules) > 1) + 1):
        for at in range(0, len(run), most):
            yield int(run[at]), int(run[min(at + most, len(run)) - 1]) + 1


def _check_cover(reader: CheckpointReader, indexes: list[PartIndex]) -> Iterator[Fault]:
    """Each tensor of the table must be stored whole, each element once; in one node's share, nothing twice."""
    infos, parts = list(reader.root.tensors.values()), list[StoredChunks]()
    join = PartJoin(infos)
    for number, (part, index) in enumerate(zip(reader.root.parts, indexes, strict=True)):
        try:
            parts.append(join.of(number, index, f"{reader.url}/{part.index}"))
        except CheckFailed as error:
            yield Fault(part.index, error.message)
    if len(parts) < len(indexes):
        return
    stored = join.joined(parts)
    if reader.root.share is not None:
        try:
            plan_load(stored.chunks, stored)
        except CheckFailed as error:
            yield Fault("root.json", error.message)
        return
    for info in infos:
        if info.placement.tied_to is None and info.numel:
            try:
                plan_load(ChunkTable.of([(info, Box((0,) * len(info.shape), info.shape), 0, info.numel)]), stored)
            except CheckFailed as error:
                yield Fault("root.json", error.message, None, (info.name,))
