"""Partition: which chunks of a checkpoint each rank of a layout stores, known from placements alone.

Every rank stores the tensors of its stage: its tensor-parallel box of each (replicated ones only on tp rank 0), cut to
the interval that its dp rank owns of the ZeRO bucket. Parameters and each kind of optimizer state are buckets of their
own, in storage order.
"""

from collections.abc import Sequence

from ckptkit.bucket import bucket_offsets, overlaps, shard_interval
from ckptkit.chunk import Box
from ckptkit.layout import Coords, ParallelLayout
from ckptkit.tensor import ITEMSIZE, TensorInfo, storage_order

RankChunk = tuple[TensorInfo, Box, int, int]


def rank_chunks(
    tensors: Sequence[TensorInfo], num_layers: int, layout: ParallelLayout, coords: Coords
) -> list[RankChunk]:
    """The (tensor, box, start, stop) that the rank at `coords` stores; UserError where the layout does not divide."""
    assert layout.cp == layout.ep == layout.virtual == 1, "tp, dp and pp only"
    buckets: dict[tuple[str, int], list[tuple[TensorInfo, Box]]] = {}
    for info in sorted(tensors, key=storage_order):
        if info.placement.tied_to is None and info.placement.on_stage(num_layers, layout, coords.pp):
            box = info.placement.local_box(info.name, info.shape, layout, coords)
            key = (info.name.rpartition("/")[0], ITEMSIZE[info.dtype])
            buckets.setdefault(key, []).append((info, box))
    chunks: list[RankChunk] = []
    for (_, itemsize), members in buckets.items():
        numels = [box.numel for _, box in members]
        offsets, total = bucket_offsets(numels, itemsize)
        interval = shard_interval(total, layout.dp, coords.dp, itemsize)
        for index, start, stop in overlaps(offsets, numels, *interval):
            info, box = members[index]
            if info.placement.dim is not None or coords.tp == 0:
                chunks.append((info, box, start, stop))
    return chunks
