"""Export: a committed step as a folder of Zarr arrays (version 3), which tensorstore and any reader of Zarr opens.

Each tensor is an array under its name, uncompressed, in chunks of rows: a chunk's file is its elements, with zeros in
place of the rows that the last one lacks. The root's `zarr.json` comes last; it has what a run knows beside values,
so that an import brings that back, and the certificate of the save. Each array says that it is of such a folder.
Nothing but this project is needed. Memory: two blocks of 32 MiB.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

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
from ckptkit.foreign.zarr.folder import ATTRIBUTES, VERSION
from ckptkit.format.root import Root
from ckptkit.format.tensor_rows import tensor_lines
from ckptkit.io.torch_tensors import NAMES
from ckptkit.loading.chunk_source import ChunkSource
from ckptkit.model.tensor import ITEMSIZE, TensorInfo, storage_order
from ckptkit.plan.certificate import is_readable
from threefold.errors import UserError
from threefold.storage import Storage

BLOCK_BYTES, CHUNK_BYTES = 32 << 20, 128 << 20


@dataclass(frozen=True, slots=True)
class Chunk:
    """One file: elements [start, stop) of a tensor, then zeros."""

    name: str
    info: TensorInfo
    start: int
    stop: int
    size_bytes: int

    def pieces(self, reader: SourceReader) -> Iterator[FilePiece]:
        """Yield the elements; what is behind them is zeros."""
        num_bytes = (self.stop - self.start) * ITEMSIZE[self.info.dtype]
        yield FilePiece(0, num_bytes, partial(reader.read_bytes, self.info, self.start))


def export_tensorstore(
    source: ChunkSource,
    target: Storage,
    *,
    progress: Progress = lambda done, total: None,
    dry_run: bool = False,
) -> ExportReport:
    """Write all tensors of a step into an empty folder.

    UserError if the folder holds anything else than what the same call began or made; nothing is written then, nor left
    after damage of the step. After a fault of the storage the same call goes on.
    """
    started_s = time.monotonic()
    root = source.root
    root.check_whole(source.url)
    held = [info for info in root.tensors.values() if info.placement.tied_to is None]
    chunks = [chunk for info in sorted(held, key=storage_order) for chunk in chunks_of(info)]
    small = {f"{info.name}/zarr.json": _array(info) for info in held} | {"zarr.json": _group(root)}
    _check([*(chunk.name for chunk in chunks), *small], source.url)
    plan = FolderPlan(
        note=note_of(source, {}, to="tensorstore"),
        large={chunk.name: LargeFile(chunk.size_bytes, b"", chunk.pieces) for chunk in chunks},
        block_bytes=BLOCK_BYTES,
        small=small,
    )
    return write_folder(source, target, plan, progress=progress, dry_run=dry_run, started_s=started_s)


def chunk_rows(info: TensorInfo) -> int:
    """Return the rows of a chunk: as few chunks as can be of at most CHUNK_BYTES, as equal as can be.

    10 rows of which 4 fit are chunks of 4, the last with 2 rows of zeros; 9 rows are chunks of 3.
    """
    rows, width = info.shape[0], info.size_bytes // max(info.shape[0], 1)
    count = -(-rows // max(CHUNK_BYTES // max(width, 1), 1))
    return -(-rows // max(count, 1))


def chunks_of(info: TensorInfo) -> Iterator[Chunk]:
    """Yield the files of a tensor; one without elements has none."""
    if not info.shape:
        yield Chunk(f"{info.name}/c", info, 0, 1, info.size_bytes)
    elif info.numel:
        rows = chunk_rows(info)
        step = rows * (info.numel // info.shape[0])
        for number, start in enumerate(range(0, info.numel, step)):
            key = "/".join([f"{info.name}/c/{number}", *("0" for _ in info.shape[1:])])
            yield Chunk(key, info, start, min(start + step, info.numel), step * ITEMSIZE[info.dtype])


def _array(info: TensorInfo) -> bytes:
    """Return the description of an array."""
    shape = [max(chunk_rows(info), 1), *(max(n, 1) for n in info.shape[1:])] if info.shape else []
    kind = NAMES[info.dtype]
    return _json({
        "zarr_format": 3, "node_type": "array", "shape": list(info.shape), "data_type": kind,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shape}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": False if kind == "bool" else 0.0 if "float" in kind else 0,
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "attributes": {ATTRIBUTES: {"version": VERSION}},
    })  # fmt: skip


def _group(root: Root) -> bytes:
    """Return the description of the folder, with what a run knows beside values."""
    tensors = json.loads(f"[{tensor_lines(root.tensors)}]")
    known = {"version": VERSION, "num_layers": root.num_layers, "tensors": tensors, "metadata": dict(root.metadata),
             "certificate": root.certificate if is_readable(root.certificate) else None}  # fmt: skip
    return _json({"zarr_format": 3, "node_type": "group", "attributes": {ATTRIBUTES: known}})


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def _check(names: list[str], url: str) -> None:
    """Raise UserError if a tensor's name is not one of a folder, or makes another's array part of its own."""
    files = set(names)
    for name in names:
        words = name.split("/")
        if any(word in ("", ".", "..") for word in words):
            raise UserError(f"{url} has tensor {name.rpartition('/c')[0]!r}, whose name no folder can have")
        above = next(("/".join(words[:n]) for n in range(1, len(words)) if "/".join(words[:n]) in files), None)
        if above is not None:
            raise UserError(f"{url} has tensors of which one's file {above} is a folder of another", hint="--to dcp")
