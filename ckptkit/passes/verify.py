"""Verify: reads every byte of a checkpoint and names all damage, not only the first."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from ckptkit.chunk import Box
from ckptkit.chunk_table import ChunkTable
from ckptkit.format.data_file import DataFile
from ckptkit.format.part_index import PartIndex
from ckptkit.io.blocks import GRANULE_BYTES, BlockReader, checksums, shown_names
from ckptkit.io.remote_reader import RemoteReader
from ckptkit.loading.reader import CheckpointReader
from ckptkit.plan import StoredChunks, plan_load
from threefold.errors import CheckFailed, StorageError, UserError

WINDOW_BYTES = 16 << 20


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
    """What was read and what is wrong with it."""

    step: int
    num_files: int
    bytes_read: int
    faults: tuple[Fault, ...]

    @property
    def ok(self) -> bool:
        return not self.faults


def verify_checkpoint(reader: CheckpointReader) -> Verification:
    """Check every index, every granule of every data file, and that each tensor is held whole and once."""
    with ThreadPoolExecutor(reader.num_threads) as pool:
        checked = list(pool.map(lambda number: _check_part(reader, number), range(len(reader.root.parts))))
    indexes = [index for index, _, _ in checked if index is not None]
    faults = [fault for _, _, found in checked for fault in found]
    if len(indexes) == len(checked):
        faults += _check_cover(reader, indexes)
    return Verification(reader.root.step, len(checked), sum(read for _, read, _ in checked), tuple(faults))


def _check_part(reader: CheckpointReader, number: int) -> tuple[PartIndex | None, int, list[Fault]]:
    part = reader.root.parts[number]
    try:
        index = reader.read_index(part)
    except (CheckFailed, StorageError) as error:
        return None, 0, [Fault(part.index, error.message)]
    try:
        source = reader.open_part(number, None)
    except StorageError as error:
        return index, 0, [Fault(part.data, error.message, None, index.chunks.names)]
    try:
        return index, part.data_bytes, list(_check_data(source, index, part.data))
    except StorageError as error:
        return index, source.bytes_read, [Fault(part.data, error.message, None, index.chunks.names)]
    except OSError as error:
        return index, source.bytes_read, [Fault(part.data, str(error), None, index.chunks.names)]
    finally:
        source.close()


def _check_data(source: BlockReader | RemoteReader, index: PartIndex, name: str) -> Iterator[Fault]:
    header = DataFile.of(index.chunks).header
    if len(header) != index.data_offset:
        yield Fault(name, f"its index puts the data at byte {index.data_offset}, its chunks at {len(header)}", 0)
        return
    buffer = np.empty(WINDOW_BYTES, np.uint8)
    for start in range(0, index.size_bytes, WINDOW_BYTES):
        size = min(WINDOW_BYTES, index.size_bytes - start)
        source.read([(start, size, buffer.ctypes.data)], num_threads=1)
        first = start // GRANULE_BYTES
        found = checksums(buffer[:size])
        for granule in np.flatnonzero(found != index.checksums[first : first + len(found)]).tolist():
            at = start + granule * GRANULE_BYTES
            yield Fault(
                name,
                "the 1 MiB from here does not have its checksum",
                at,
                index.tensors_between(at, at + GRANULE_BYTES),
            )
        same = min(max(len(header) - start, 0), size)
        if buffer[:same].tobytes() != header[start : start + same]:
            yield Fault(name, "its safetensors header is not the one that its index describes", start)


def _check_cover(reader: CheckpointReader, indexes: list[PartIndex]) -> Iterator[Fault]:
    """Each tensor of the table must be stored whole, each element once; in one node's share, nothing twice."""
    infos = list(reader.root.tensors.values())
    try:
        stored = StoredChunks.of(indexes, infos)
    except UserError as error:
        yield Fault("root.json", error.message)
        return
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
