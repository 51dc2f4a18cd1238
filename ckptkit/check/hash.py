"""Content hashes of a checkpoint that do not depend on how it is cut, in one streaming pass.

Memory: a slab, one granule of each open file, and what the source holds of all part indexes.

Per tensor: XXH3-128 over the XXH3-128 digests (16 bytes each, big-endian) of the 1 MiB blocks of its global row-major
bytes at its true shape. Totals: XXH3-128 over one line `name NUL dtype NUL shape NUL digest LF` a tensor, sorted by
name; shape is decimal numbers joined by commas. `params` are the tensors outside `optim.`, `optim` those inside. Tied
tensors have no bytes of their own and are left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import xxhash

from ckptkit.check.slabs import fill
from ckptkit.loading.chunk_source import ChunkSource
from ckptkit.model.slab import SLAB_BYTES, STEP_BYTES, Slab, slab_batches
from ckptkit.model.tensor import TensorInfo, storage_order

OPTIMIZER_PREFIX = "optim."


@dataclass(frozen=True)
class CheckpointHash:
    """Hex digests: one a tensor by name, and the totals."""

    tensors: dict[str, str]
    params: str
    optim: str
    all: str


def hash_checkpoint(source: ChunkSource, *, slab_bytes: int = SLAB_BYTES) -> CheckpointHash:
    """Hash every tensor of a checkpoint; reads each byte once. UserError where it is one node's part of a step."""
    source.root.check_whole(source.url)
    infos = {info.name: info for info in source.root.tensors.values() if info.placement.tied_to is None}
    states = {name: xxhash.xxh3_128() for name in infos}
    for slab, data in read_slabs(source, slab_bytes):
        for start in range(0, len(data), STEP_BYTES):
            states[slab.info.name].update(xxhash.xxh3_128_digest(data[start : start + STEP_BYTES]))
    digests = {name: state.hexdigest() for name, state in states.items()}
    optim = [info for name, info in infos.items() if name.startswith(OPTIMIZER_PREFIX)]
    params = [info for name, info in infos.items() if not name.startswith(OPTIMIZER_PREFIX)]
    return CheckpointHash(digests, _total(params, digests), _total(optim, digests), _total(params + optim, digests))


def read_slabs(source: ChunkSource, slab_bytes: int = SLAB_BYTES) -> Iterator[tuple[Slab, memoryview]]:
    """Yield all tensors' global row-major bytes, slab by slab; the bytes are valid until the next slab is asked for."""
    buffer = np.empty(slab_bytes, np.uint8)
    for batch in slab_batches(sorted(source.root.tensors.values(), key=storage_order), slab_bytes):
        ranges = [(slab.info, slab.start, slab.stop) for slab in batch]
        for slab, data in zip(batch, fill(source, ranges, buffer), strict=True):
            yield slab, data.data


def _total(infos: list[TensorInfo], digests: dict[str, str]) -> str:
    state = xxhash.xxh3_128()
    for info in sorted(infos, key=lambda info: info.name):
        shape = ",".join(map(str, info.shape))
        state.update(f"{info.name}\0{info.dtype}\0{shape}\0{digests[info.name]}\n".encode())
    return state.hexdigest()
