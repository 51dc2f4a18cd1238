"""Slabs of one or several checkpoints, read in step: for each range of a tensor, its bytes in every one of them.

All bytes were verified. Memory: for each checkpoint two slabs, since one is read while the other is used, one granule
of each open file, and what its reader holds of all part indexes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from shlex import quote

import numpy as np

from ckptkit.format.root import Root
from ckptkit.io.blocks import Bytes
from ckptkit.loading.chunk_source import ChunkSource, read_chunks
from ckptkit.model.chunk_table import ChunkTable
from ckptkit.model.slab import Slab, slab_batches
from ckptkit.model.tensor import ITEMSIZE, Box, TensorInfo, storage_order
from threefold.errors import CheckFailed, UserError

AHEAD_SLAB_BYTES = 32 << 20  # two of them are as large as a slab of a pass without another beside it


@dataclass(frozen=True)
class Source:
    """A checkpoint that is read, and for each tensor that is asked for the one that holds its bytes."""

    chunks: ChunkSource
    holders: Mapping[str, TensorInfo]


def chosen(roots: Sequence[Root], only: Sequence[str]) -> list[dict[str, TensorInfo]]:
    """Return each root's tensors whose name fits one of some patterns, all without one; UserError if none has any."""
    tables = [
        {name: info for name, info in root.tensors.items() if not only or any(fnmatchcase(name, each) for each in only)}
        for root in roots
    ]
    if only and not any(tables):
        example = min((name for root in roots for name in root.tensors), default="*")
        raise UserError(f"no tensor is named {' or '.join(only)}", hint=f"--only '{example}'")
    return tables


def holder_of(info: TensorInfo, root: Root) -> TensorInfo:
    """Return the tensor whose bytes a tensor has: another one if it is tied to that, else itself."""
    return info if info.placement.tied_to is None else root.tensors[info.placement.tied_to]


def fill(source: ChunkSource, ranges: Sequence[tuple[TensorInfo, int, int]], buffer: Bytes) -> list[Bytes]:
    """Read elements [start, stop) of tensors into a buffer, one after the other, and return the bytes of each.

    The hint of damage names other steps of the run that is read, as readers of several runs may be at work.
    """
    wanted = ChunkTable.of([
        (info, Box.whole(info.shape), start, stop) for info, start, stop in ranges
    ])  # fmt: skip
    places = np.cumsum([0] + [(stop - start) * ITEMSIZE[info.dtype] for info, start, stop in ranges])
    try:
        read_chunks(source, wanted, buffer.ctypes.data + places[:-1])
    except CheckFailed as damage:
        if source.files is not None:
            damage.hint = damage.hint or f"ckptkit ls {quote(source.files.storage.url)}"
        raise
    return [buffer[start:stop] for start, stop in pairwise(places.tolist())]


def read_whole(source: ChunkSource, info: TensorInfo) -> bytes:
    """Return the bytes of a whole tensor."""
    [data] = fill(source, [(info, 0, info.numel)], np.empty(info.size_bytes, np.uint8))
    return data.tobytes()


def read_ahead(
    pool: ThreadPoolExecutor, sources: Sequence[Source], tensors: Iterable[TensorInfo], slab_bytes: int
) -> Iterator[tuple[Slab, tuple[Bytes, ...]]]:
    """Yield slabs of all tensors with their bytes in each source; these are valid until the next slab is asked for.

    A tensor's dtype here is the widest that a source holds it in, so that a slab fits into a buffer of each.
    """
    buffers = [[np.empty(slab_bytes, np.uint8) for _ in sources] for _ in range(2)]
    ready: list[tuple[Slab, tuple[Bytes, ...]]] = []
    for number, batch in enumerate(slab_batches(sorted(tensors, key=storage_order), slab_bytes)):
        reads = [
            pool.submit(
                fill,
                source.chunks,
                [(source.holders[slab.info.name], slab.start, slab.stop) for slab in batch],
                buffer,
            )
            for source, buffer in zip(sources, buffers[number % 2], strict=True)
        ]
        yield from ready
        ready = list(zip(batch, zip(*[read.result() for read in reads], strict=True), strict=True))
    yield from ready
