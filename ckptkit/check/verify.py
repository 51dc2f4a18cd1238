"""Verify: reads a checkpoint, all of it, a sample or its manifest alone, and names all damage, not only the first."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckptkit.format.data_file import MAX_CHUNKS, DataFile
from ckptkit.format.keys import ROOT_KEY, writer_of
from ckptkit.format.part_index import PartIndex
from ckptkit.format.root import Part
from ckptkit.io.blocks import GRANULE_BYTES, Bytes, checksums, shown_names
from ckptkit.io.sums import ChunkSums
from ckptkit.loading.chunk_source import ChunkSource, reading_threads
from ckptkit.loading.reader import CheckpointReader
from ckptkit.plan.certificate import differing, is_readable
from ckptkit.plan.cover import Cover
from threefold.errors import CheckFailed, listed
from threefold.storage.second_look import say_right

WINDOW_BYTES = 16 << 20
NOT_AS_SAVED = "the values are not those that were saved, by their sums"
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
    """What was read of the data files, of how many bytes in all, and what is wrong.

    `num_certified` tensors were read whole and are equal to what was saved, by the root's certificate.
    """

    step: int
    num_files: int
    bytes_read: int
    data_bytes: int
    faults: tuple[Fault, ...]
    num_certified: int = 0

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
    root = reader.root
    cover = Cover(list(root.tensors.values()), is_share=root.share is not None)
    sizes = reader.files.size_faults()
    with reading_threads(reader.num_threads, reader) as pool:
        checks = pool.map(lambda number: _check_part(reader, cover, sizes, number, share, seed), range(len(root.parts)))
        checked = list(checks)
    faults = [fault for _, _, found in checked for fault in found]
    if faults:
        reader.files.check_still_there()
    if all(is_counted for is_counted, _, _ in checked):
        found = cover.faults(lambda: ((writer_of(part.index), reader.files.read_index(part)) for part in root.parts))
        faults += [Fault(ROOT_KEY, fault.what, None, (fault.tensor,)) for fault in found]
    saved, certificate = root.certificate, cover.certificate
    num_certified = 0
    if not faults and certificate is not None and is_readable(saved):
        wrong = differing(saved, certificate)
        faults += [Fault(ROOT_KEY, NOT_AS_SAVED, None, (name,)) for name in wrong]
        num_certified = len(certificate["tensors"]) - len(wrong) if share == 1 else 0
    data_bytes, bytes_read = sum(part.data_bytes for part in root.parts), sum(read for _, read, _ in checked)
    return Verification(root.step, len(checked), bytes_read, data_bytes, tuple(faults), num_certified)


def check_files(source: ChunkSource) -> None:
    """Raise CheckFailed if a file that the root names is missing or has another size; by one listing, nothing is read.

    Nothing is looked up for a folder of another program: opening it has done so.
    """
    if source.files is not None and (faults := source.files.size_faults()):
        source.files.check_still_there()
        raise CheckFailed(f"{source.url} is not whole:{listed([f'{key} {what}' for key, what in faults.items()])}")


def sampled_granules(num_granules: int, share: float, seed: Sequence[int]) -> Granules:
    """Return the granules of a file that a sample of it reads, ascending: the first, the last, and others at random."""
    chosen = np.random.default_rng(seed).random(num_granules) < share
    chosen[[0, -1]] = True
    return np.flatnonzero(chosen)


def check_data(
    reader: CheckpointReader,
    number: int,
    index: PartIndex,
    granules: Granules | None = None,
    max_chunks: int = MAX_CHUNKS,
) -> tuple[int, list[Fault]]:
    """Return the bytes read of a data file, all its granules or some, and the faults in them."""
    part, faults = reader.root.parts[number], list[Fault]()
    if len(index.chunks) > max_chunks:
        return 0, [Fault(part.index, f"{len(index.chunks)} chunks, a file has at most {max_chunks}")]
    header = DataFile.of(index.chunks).header
    if len(header) != index.data_offset:
        what = f"its index puts the data at byte {index.data_offset}, its chunks at {len(header)}"
        return 0, [Fault(part.data, what, 0)]
    try:
        with reader.files.loss_as_damage(part.data, part.data_bytes):
            source = reader.files.open_part(number, None)
    except CheckFailed as error:
        return 0, [_lost(part, index, error)]
    buffer = np.empty(WINDOW_BYTES, np.uint8)
    is_whole = granules is None or len(granules) == len(index.checksums)
    sums = ChunkSums(index.chunks, index.data_offset) if is_whole and index.sums is not None else None
    try:
        for first, stop in _stretches(np.arange(len(index.checksums)) if granules is None else granules):
            start = first * GRANULE_BYTES
            size = min(stop * GRANULE_BYTES, index.size_bytes) - start
            reader.files.read_part(number, source, [(start, size, buffer.ctypes.data)])
            found = checksums(buffer[:size])
            differing = (first + np.flatnonzero(found != index.checksums[first:stop])).tolist()
            for granule in _still_differing(reader, part, index, differing, buffer[:size], start):
                at = granule * GRANULE_BYTES
                held = index.tensors_between(at, at + GRANULE_BYTES)
                faults.append(Fault(part.data, "the 1 MiB from here does not have its checksum", at, held))
            same = min(max(len(header) - start, 0), size)
            if sums is not None:
                sums.add(buffer[:size], start)
            if buffer[:same].tobytes() != header[start : start + same]:
                what = "its safetensors header is not the one that its index describes"
                faults.append(Fault(part.data, what, start))
        if sums is not None and not faults:
            wrong = np.flatnonzero(sums.values != index.sums).tolist()
            faults += [Fault(part.data, NOT_AS_SAVED, None, (index.chunks.names[tensor],)) for tensor in wrong]
    except CheckFailed as error:
        faults.append(_lost(part, index, error))
    finally:
        source.close()
    return source.bytes_read, faults


def _still_differing(
    reader: CheckpointReader, part: Part, index: PartIndex, granules: Sequence[int], buffer: Bytes, start: int
) -> list[int]:
    """Return those of some granules that are not right at a second look either; the others' bytes go into a buffer.

    It begins at byte `start` of the file.
    """
    storage = reader.files.storage.afresh() if granules else None
    if storage is None:
        return list(granules)
    left = []
    for granule in granules:
        at = granule * GRANULE_BYTES
        with reader.files.loss_as_damage(part.data, part.data_bytes):
            [data] = storage.read_ranges(
                f"{reader.files.folder}/{part.data}", [(at, min(at + GRANULE_BYTES, index.size_bytes))]
            )
        seen = np.frombuffer(data, np.uint8)
        if checksums(seen)[0] != index.checksums[granule]:
            left.append(granule)
            continue
        buffer[at - start : at - start + len(seen)] = seen
        say_right(f"{reader.url}/{part.data}, granule {granule},")
    return left


def _lost(part: Part, index: PartIndex, error: CheckFailed) -> Fault:
    """Return a data file that is not there as it should be, and all that it holds."""
    return Fault(part.data, error.message, None, index.tensors_between(0, index.size_bytes))


def _check_part(
    reader: CheckpointReader, cover: Cover, sizes: Mapping[str, str], number: int, share: float, seed: int
) -> tuple[bool, int, list[Fault]]:
    """Return whether a part's chunks went into the cover, the bytes read of its data file, and its faults."""
    part = reader.root.parts[number]
    try:
        index = reader.files.read_index(part)
        cover.add(index, f"{reader.url}/{part.index}")
    except CheckFailed as error:
        return False, 0, [Fault(part.index, error.message)]
    faults = [Fault(part.index, sizes[part.index])] if part.index in sizes else []
    if part.data in sizes:
        return True, 0, [*faults, _lost(part, index, CheckFailed(f"{reader.url}/{part.data} {sizes[part.data]}"))]
    if share:
        granules = sampled_granules(len(index.checksums), share, (seed, number))
        num_bytes, found = check_data(reader, number, index, granules)
        return True, num_bytes, [*faults, *found]
    return True, 0, faults


def _stretches(granules: Granules) -> Iterator[tuple[int, int]]:
    """Ascending granules as [first, stop) of neighbours, as many as the window holds."""
    most = WINDOW_BYTES // GRANULE_BYTES
    for run in np.split(granules, np.flatnonzero(np.diff(granules) > 1) + 1):
        for at in range(0, len(run), most):
            yield int(run[at]), int(run[min(at + most, len(run)) - 1]) + 1
