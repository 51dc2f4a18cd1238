"""Export: a committed step as a folder that `transformers` opens, in one pass and bounded memory.

config.json comes last of the files. Every byte that is read of the run is verified. Memory: two blocks of 64 MiB, a
granule of each open file, and the largest tensor that the folder has with its dims in the other order, twice.
"""

import time
from bisect import bisect_right

import numpy as np

from ckptkit.check.elements import narrowed, widened
from ckptkit.check.slabs import fill
from ckptkit.foreign.folder_claim import note_of
from ckptkit.foreign.folder_export import ExportReport, FolderPlan, Progress, SourceSums, write_folder
from ckptkit.foreign.hf.plan import Outgoing, Shard, export_of
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
    export, sums = export_of(source, like, max_shard_bytes, dtype), SourceSums(source.root, source.url)
    shards = {shard.name: shard for shard in export.shards}
    plan = FolderPlan(
        note=note_of(source, export.sizes, dtype=dtype),
        large={name: shard.size_bytes for name, shard in shards.items()},
        heads={name: shard.header for name, shard in shards.items()},
        loads=lambda name: _ShardLoader(source, shards[name], sums).load,
        block_bytes=BLOCK_BYTES,
        small=export.small,
    )
    return write_folder(source, target, plan, sums, progress=progress, dry_run=dry_run, started_s=started_s)


class _ShardLoader:
    """What fills the blocks of one shard."""

    def __init__(self, source: ChunkSource, shard: Shard, sums: SourceSums) -> None:
        self._source, self._shard, self._sums = source, shard, sums
        self._starts = [len(shard.header)]
        for tensor in shard.tensors:
            self._starts.append(self._starts[-1] + tensor.size_bytes)
        self._made: tuple[str, Bytes] = ("", np.empty(0, np.uint8))  # the turned or fused tensor that was made last

    def load(self, start: int, block: Bytes) -> None:
        """Fill a block: the header, and tensors."""
        stop = start + len(block)
        head = np.frombuffer(self._shard.header, np.uint8)[start:stop]
        block[: len(head)] = head
        number = max(bisect_right(self._starts, start) - 1, 0)
        for tensor, at in zip(self._shard.tensors[number:], self._starts[number:], strict=False):
            first, last = max(at, start), min(at + tensor.size_bytes, stop)
            if first >= stop:
                break
            if first < last:
                self._load_part(tensor, first - at, last - at, block[first - start : last - start])

    def _load_part(self, tensor: Outgoing, first: int, last: int, buffer: Bytes) -> None:
        """Fill a buffer with bytes [first, last) of a tensor."""
        if not tensor.is_turned:
            at, itemsize = 0, ITEMSIZE[tensor.dtype]
            for info, start, stop in tensor.spans(first // itemsize, last // itemsize):
                size = (stop - start) * itemsize
                self._fill(info, start, stop, tensor.dtype, buffer[at : at + size])
                at += size
            return
        if self._made[0] != tensor.name:
            self._made = tensor.name, self._whole(tensor)
        buffer[:] = self._made[1][first:last]

    def _whole(self, tensor: Outgoing) -> Bytes:
        """Return all bytes of a tensor that has its dims in the other order, made of one or several of the run's."""
        made = np.empty(tensor.shape, f"u{ITEMSIZE[tensor.dtype]}")
        for row, info in tensor.sources:
            values = np.empty(info.numel, made.dtype)
            self._fill(info, 0, info.numel, tensor.dtype, values.view(np.uint8))
            values = values.reshape(row.shape)
            made[..., row.first : row.first + row.shape[0]] = values.T
        return made.reshape(-1).view(np.uint8)

    def _fill(self, info: TensorInfo, first: int, last: int, dtype: str, buffer: Bytes) -> None:
        """Fill a buffer with elements [first, last) of a tensor of the run, rounded if their dtype is another."""
        if info.dtype == dtype:
            fill(self._source, [(info, first, last)], buffer)
            self._sums.add(info, first, last, buffer)
            return
        for start in range(first, last, ROUNDED_AT_ONCE):
            stop = min(start + ROUNDED_AT_ONCE, last)
            read = np.empty((stop - start) * ITEMSIZE[info.dtype], np.uint8)
            [block] = fill(self._source, [(info, start, stop)], read)
            self._sums.add(info, start, stop, block)
            try:
                made = narrowed(widened(block, info.dtype), dtype)
            except OverflowError:
                hint = "another --dtype, or none"
                raise UserError(f"{self._source.url}: {info.name} holds a value beyond {dtype}", hint=hint) from None
            buffer[(start - first) * ITEMSIZE[dtype] :][: len(made)] = made
