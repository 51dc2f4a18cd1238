"""Export: a committed step as a folder that torch.distributed.checkpoint (DCP) reads, in one pass and bounded memory.

Files are what `torch.save` makes of each tensor, zip after zip, cut into chunks of rows so that none is large;
`.metadata` comes last. Tensors keep their names; a step that DCP saved, or that was imported from it, has its nested
state again, pickled values included. torch is not needed. Memory: two blocks of 64 MiB and a granule of each open file.
"""

import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from ckptkit.check.slabs import read_whole
from ckptkit.foreign.dcp.folder import COMMON, COMMON_STATE, CONFIG
from ckptkit.foreign.dcp.metadata import FILE, DcpChunk, DcpContents, DcpTensor, write_metadata
from ckptkit.foreign.folder_claim import note_of
from ckptkit.foreign.folder_export import (
    ExportReport,
    FilePiece,
    FolderPlan,
    LargeFile,
    Progress,
    SourceReader,
    write_folder,
)
from ckptkit.foreign.hf.contents import FILES
from ckptkit.foreign.hf.export import MAX_SHARD_BYTES
from ckptkit.foreign.stored_parts import Place
from ckptkit.foreign.torch_files.zip_writer import TensorZip
from ckptkit.format.dcp_state import DcpState
from ckptkit.format.root import Root
from ckptkit.format.state_tree import METADATA
from ckptkit.io.blocks import Bytes
from ckptkit.io.torch_tensors import NAMES
from ckptkit.loading.chunk_source import ChunkSource
from ckptkit.model.tensor import ITEMSIZE, TensorInfo, storage_order
from threefold.errors import UserError
from threefold.storage import Storage

BLOCK_BYTES, CHUNK_BYTES, ALIGNMENT = 64 << 20, 256 << 20, 64
MAX_CHUNK_BYTES = 0xFFFFFFFF - (1 << 20)  # of a zip without the extension for large files


@dataclass(frozen=True)
class FileItem:
    """Elements [start, stop) of a tensor in a file: its zip begins at `offset`, None around a pickled value."""

    info: TensorInfo
    start: int
    stop: int
    offset: int
    around: TensorZip | None

    @cached_property
    def head(self) -> bytes:
        """The bytes before its elements."""
        return self.around.head if self.around else b""

    @property
    def begin(self) -> int:
        """Where its elements begin in the file."""
        return self.offset + len(self.head)

    @property
    def elements_end(self) -> int:
        """Where its elements end in the file."""
        return self.begin + (self.stop - self.start) * ITEMSIZE[self.info.dtype]

    @cached_property
    def end(self) -> int:
        """Where the next item may begin."""
        return self.elements_end + len(self.tail(0))

    def tail(self, crc: int) -> bytes:
        """Return the bytes behind its elements, which have a checksum."""
        return self.around.tail(crc) if self.around else b""

    def pieces(self, reader: SourceReader) -> Iterator[FilePiece]:
        """Yield its zip's begin, its elements and its zip's end, which has their checksum."""
        crc = 0

        def read(first: int, last: int, memory: Bytes) -> None:
            nonlocal crc
            reader.read_bytes(self.info, self.start, first, last, memory)
            crc = zlib.crc32(memory.data, crc)

        yield FilePiece.of_bytes(self.offset, len(self.head), lambda: self.head)
        yield FilePiece(self.begin, self.elements_end, read)
        yield FilePiece.of_bytes(self.elements_end, self.end - self.elements_end, lambda: self.tail(crc))


@dataclass(frozen=True, slots=True)
class DcpFile:
    """One file: items one after the other, with zeros before the elements of some so that these are aligned."""

    name: str
    items: tuple[FileItem, ...]

    @property
    def head(self) -> bytes:
        """How the file begins."""
        return bytes(self.items[0].offset) + self.items[0].head

    def pieces(self, reader: SourceReader) -> Iterator[FilePiece]:
        """Yield zips and pickled values; zeros are between them."""
        for item in self.items:
            yield from item.pieces(reader)


def export_dcp(
    source: ChunkSource,
    target: Storage,
    *,
    kind: Literal["dcp", "torch_dist"] = "dcp",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress = lambda done, total: None,
    dry_run: bool = False,
) -> ExportReport:
    """Write all tensors of a step into an empty folder; as `torch_dist` with the files that it was imported with.

    UserError if the folder holds anything else than what the same call began or made; nothing is written then, nor left
    after damage of the step. After a fault of the storage the same call goes on.
    """
    started_s = time.monotonic()
    root = source.root
    root.check_whole(source.url)
    state = _state(root, source.url)
    beside = _files_beside(source) if kind == "torch_dist" else {}
    root = replace(root, tensors={n: info for n, info in root.tensors.items() if n.removeprefix(FILES) not in beside})
    files = planned(root, state, max_shard_bytes)
    small = {FILE: write_metadata(_contents(root, state, files)), **beside}
    sizes = {file.name: file.items[-1].end for file in files} | {name: len(data) for name, data in small.items()}
    plan = FolderPlan(
        note=note_of(source, sizes, to=kind),
        large={file.name: LargeFile(sizes[file.name], file.head, file.pieces) for file in files},
        block_bytes=BLOCK_BYTES,
        small=small,
    )
    return write_folder(source, target, plan, progress=progress, dry_run=dry_run, started_s=started_s)


def _files_beside(source: ChunkSource) -> dict[str, bytes]:
    """Return the files of a step that was imported from torch_dist; UserError if it was not."""
    files = {}
    for name in (COMMON, CONFIG):  # the latter says that a folder is complete
        info = source.root.tensors.get(FILES + name)
        if info is None and name == COMMON and COMMON_STATE in source.root.tensors:
            continue
        if info is None:
            raise UserError(f"{source.url} has no {name}, as it was not imported from torch_dist", hint="--to dcp")
        files[name] = read_whole(source, info)
    return files


def planned(root: Root, state: DcpState, max_shard_bytes: int) -> list[DcpFile]:
    """Return the files that hold the tensors of a step, tied ones left out."""
    files: list[list[FileItem]] = [[]]
    held = [info for info in root.tensors.values() if info.placement.tied_to is None]
    for info in sorted(held, key=storage_order):
        for start, stop in _ranges(info, state):
            at = files[-1][-1].end if files[-1] else 0
            if at >= max_shard_bytes:
                files.append([])
                at = 0
            num_bytes = (stop - start) * ITEMSIZE[info.dtype]
            around = TensorZip(_dtype(info, state), _shape(info, start, stop, state), num_bytes)
            item = FileItem(info, start, stop, at, None if info.name in state.blobs else around)
            padding = -item.begin % ALIGNMENT if item.around else 0
            files[-1].append(replace(item, offset=at + padding))
    return [DcpFile(f"__0_{number}.distcp", tuple(items)) for number, items in enumerate(files) if items]


def _state(root: Root, url: str) -> DcpState:
    """Return how DCP is to see a step; a step that it did not save is a flat state."""
    if METADATA in root.metadata:
        text = f"{url} holds a state of ckptkit.torch.Run, whose values other than tensors cannot be made DCP's"
        raise UserError(text, hint="load it in a program and save that by dcp.save")
    return DcpState.of(root.metadata, url) or DcpState({name: (name,) for name in root.tensors})


def _ranges(info: TensorInfo, state: DcpState) -> Iterator[tuple[int, int]]:
    """Yield the elements of each chunk: whole rows, as many as fit."""
    if info.name in state.blobs or not info.shape or not info.numel:
        yield 0, info.numel
        return
    width = info.numel // info.shape[0]
    step = max(CHUNK_BYTES // (width * ITEMSIZE[info.dtype]), 1) * width
    if min(step, info.numel) * ITEMSIZE[info.dtype] > MAX_CHUNK_BYTES:
        raise UserError(f"{info.name} {list(info.shape)} has rows of more than 4 GiB, which are not written")
    for start in range(0, info.numel, step):
        yield start, min(start + step, info.numel)


def _shape(info: TensorInfo, start: int, stop: int, state: DcpState) -> tuple[int, ...]:
    """Return the shape of a chunk as torch has it."""
    shape = info.shape[:-1] if info.name in state.dtypes else info.shape
    if not shape or not info.numel:
        return shape
    return ((stop - start) * info.shape[0] // info.numel, *shape[1:])


def _dtype(info: TensorInfo, state: DcpState) -> str:
    return state.dtypes.get(info.name) or NAMES[info.dtype]


def _contents(root: Root, state: DcpState, files: Iterable[DcpFile]) -> DcpContents:
    """Return what `.metadata` says of the files; a tied tensor is where the one is that holds its values."""
    chunks: dict[str, list[DcpChunk]] = {}
    blobs: dict[str, Place] = {}
    for file in files:
        for item in file.items:
            info, place = item.info, Place(file.name, item.offset, item.end - item.offset)
            if info.name in state.blobs:
                blobs[info.name] = place
                continue
            shape = _shape(info, item.start, item.stop, state)
            first = item.start * info.shape[0] // info.numel if shape and info.numel else 0
            offset = (first, *(0 for _ in shape[1:])) if shape else ()
            chunks.setdefault(info.name, []).append(DcpChunk(offset, shape, place))
    tensors = {}
    for name, info in root.tensors.items():
        if name not in blobs:
            shape = info.shape[:-1] if name in state.dtypes else info.shape
            tensors[name] = DcpTensor(_dtype(info, state), shape, chunks[info.placement.tied_to or name])
    paths = None if state.paths is None else {name: state.paths.get(name, (name,)) for name in root.tensors}
    return DcpContents(tensors, blobs, paths)
