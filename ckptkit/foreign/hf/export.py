"""Export: a committed step as a folder that `transformers` opens, in one pass and bounded memory.

config.json comes last of the files. Every byte that is read of the run is verified. Memory: two blocks of 64 MiB, a
granule of each open file, and the largest tensor that the folder has with its dims in the other order, twice.
"""

import time
from collections.abc import Iterator
from functools import partial
from itertools import accumulate, pairwise

import numpy as np

from ckptkit.check.elements import narrowed, widened
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
from ckptkit.foreign.hf.plan import Outgoing, TensorFile, export_of
from ckptkit.io.blocks import Bytes
from ckptkit.loading.chunk_source import ChunkSource
from ckptkit.model.tensor import ITEMSIZE, TensorInfo
from threefold.errors import UserError
from threefold.storage import Storage

BLOCK_BYTES, MAX_SHARD_BYTES = 64 << 20, 5_000_000_000
ROUNDED_AT_ONCE = 1 << 20  # elements


def export_folder(
    source: ChunkSource,
    target: Storage,
    *,
    like: Storage | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    dtype: str | None = None,
    progress: Progress = lambda done, total: None,
    dry_run: bool = False,
) -> ExportReport:
    """Write the parameters of a step into an empty folder, with config.json and the tokenizer; see `export_of`.

    With a `dtype`, F32, F16 or BF16, values are rounded to it.

    UserError if the folder holds anything else than what the same call began or made; nothing is written then, nor left
    after damage of the step. After a fault of the storage the same call goes on.
    """
    started_s = time.monotonic()
    source.root.check_whole(source.url)
    export = export_of(source, like, max_shard_bytes, dtype)
    plan = FolderPlan(
        note=note_of(source, export.sizes, dtype=dtype),
        large={
            shard.name: LargeFile(shard.size_bytes, shard.header, partial(_pieces, source.url, shard))
            for shard in export.shards
        },
        block_bytes=BLOCK_BYTES,
        small=export.small,
    )
    return write_folder(source, target, plan, progress=progress, dry_run=dry_run, started_s=started_s)


def _pieces(url: str, shard: TensorFile, reader: SourceReader) -> Iterator[FilePiece]:
    """Yield a shard's header, and its tensors."""
    yield FilePiece.of_bytes(0, len(shard.header), lambda: shard.header)
    tensors = _TensorReader(url, reader)
    ends = accumulate((tensor.size_bytes for tensor in shard.tensors), initial=len(shard.header))
    for tensor, (begin, end) in zip(shard.tensors, pairwise(ends), strict=True):
        yield FilePiece(begin, end, partial(tensors.read, tensor))


class _TensorReader:
    """Reads the tensors of one shard out of a run."""

    def __init__(self, url: str, reader: SourceReader) -> None:
        self._url, self._reader = url, reader
        self._turned: tuple[str, Bytes] = ("", np.empty(0, np.uint8))  # the turned or fused tensor that was made last

    def read(self, tensor: Outgoing, first: int, last: int, buffer: Bytes) -> None:
        """Fill a buffer with bytes [first, last) of a tensor."""
        if not tensor.is_turned:
            at, itemsize = 0, ITEMSIZE[tensor.dtype]
            for info, start, stop in tensor.spans(first // itemsize, last // itemsize):
                size = (stop - start) * itemsize
                self._fill(info, start, stop, tensor.dtype, buffer[at : at + size])
                at += size
            return
        if self._turned[0] != tensor.name:
            self._turned = tensor.name, self._whole(tensor)
        buffer[:] = self._turned[1][first:last]

    def _whole(self, tensor: Outgoing) -> Bytes:
        """Return all bytes of a tensor that has its dims in the other order, made of one or several of the run's."""
        turned = np.empty(tensor.shape, f"u{ITEMSIZE[tensor.dtype]}")
        for row, info in tensor.sources:
            values = np.empty(row.shape, turned.dtype)
            self._fill(info, 0, info.numel, tensor.dtype, values.reshape(-1).view(np.uint8))
            turned[..., row.first : row.first + row.shape[0]] = values.T
        return turned.reshape(-1).view(np.uint8)

    def _fill(self, info: TensorInfo, first: int, last: int, dtype: str, buffer: Bytes) -> None:
        """Fill a buffer with elements [first, last) of a tensor of the run, rounded if their dtype is another."""
        if info.dtype == dtype:
            self._reader.read(info, first, last, buffer)
            return
        for start in range(first, last, ROUNDED_AT_ONCE):
            stop = min(start + ROUNDED_AT_ONCE, last)
            block = np.empty((stop - start) * ITEMSIZE[info.dtype], np.uint8)
            self._reader.read(info, start, stop, block)
            try:
                rounded = narrowed(widened(block, info.dtype), dtype)
            except OverflowError:
                hint = "another --dtype, or none"
                raise UserError(f"{self._url}: {info.name} holds a value beyond {dtype}", hint=hint) from None
            buffer[(start - first) * ITEMSIZE[dtype] :][: len(rounded)] = rounded
