"""Mesh cut: which boxes of a global tensor a rank of a PyTorch DeviceMesh holds, by DTensor's placements. Pure.

A dim of 10 rows over four ranks is rows 0-2, 3-5, 6-8 and 9: DTensor rounds each part up. A strided shard, as FSDP2
over tensor parallelism makes it, is several boxes of one local tensor. Nothing is communicated.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from ckptkit.model.tensor import Box

Spans = tuple[tuple[int, int], ...]  # [start, stop) of a global dim, in the order of the local one


@dataclass(frozen=True, slots=True)
class MeshPart:
    """A box of the global tensor, and where it is in the local one: the first index of each dim."""

    box: Box
    at: tuple[int, ...]


@lru_cache(1 << 14)
def mesh_cut(
    shape: tuple[int, ...], cuts: tuple[tuple[int, int, int, int], ...]
) -> tuple[tuple[MeshPart, ...], tuple[int, ...]]:
    """Return the parts and the local shape that cuts of (dim, split factor, number of ranks, this rank) leave."""
    spans: list[Spans] = [((0, size),) for size in shape]
    for dim, factor, count, index in _in_order(cuts):
        pieces = [_chunk(piece, count, index) for piece in (_chunk(spans[dim], factor, i) for i in range(factor))]
        spans[dim] = _joined(span for piece in pieces for span in piece)
    lengths = tuple(sum(stop - start for start, stop in dim_spans) for dim_spans in spans)
    if 0 in lengths:
        return (), lengths
    placed = []
    for dim_spans in spans:
        ends, at = [], 0
        for start, stop in dim_spans:
            ends.append((start, stop - start, at))
            at += stop - start
        placed.append(ends)
    parts = [
        MeshPart(
            Box(tuple(a for a, _, _ in box), tuple(n for _, n, _ in box)),
            tuple(at for _, _, at in box),
        )
        for box in product(*placed)
    ]
    return tuple(parts), lengths


def _in_order(cuts: tuple[tuple[int, int, int, int], ...]) -> list[tuple[int, int, int, int]]:
    """Return cuts in the order in which they were made: FSDP2's strided one after that of tensor parallelism.

    The latter follows it in the mesh and has as many ranks as the split factor. 7 rows over 2 and then 3 ranks are
    0-3 and 4-6, then 0-1, 2-3, none and 4, 5, 6.
    """
    waiting, ordered = list(cuts), []
    while waiting:
        dim, factor, count, index = waiting.pop(0)
        later = [cut for cut in waiting if cut[0] == dim]
        if factor > 1 and all(cut[1] == 1 for cut in later) and math.prod(cut[2] for cut in later) == factor:
            ordered += later
            waiting = [cut for cut in waiting if cut[0] != dim]
            factor = 1
        ordered.append((dim, factor, count, index))
    return ordered


def _chunk(spans: Spans, count: int, index: int) -> Spans:
    """Return the part of a number in which torch.chunk cuts spans: of 5 rows in 2, [0, 3) and [3, 5)."""
    length = -(-sum(stop - start for start, stop in spans) // count)
    low, high = index * length, (index + 1) * length
    part, at = [], 0
    for start, stop in spans:
        a, b = max(low - at, 0), min(high - at, stop - start)
        if a < b:
            part.append((start + a, start + b))
        at += stop - start
    return tuple(part)


def _joined(spans: Iterator[tuple[int, int]]) -> Spans:
    """Return the spans with neighbours made one."""
    joined: list[tuple[int, int]] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)
