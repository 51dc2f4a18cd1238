"""Boxes: which parts of a global tensor a rank holds, for a plain tensor and for a DTensor of any placements.

A dim of 10 rows over four ranks is rows 0-2, 3-5, 6-8 and 9: DTensor rounds each part up. A strided shard, as FSDP2
over tensor parallelism makes it, is several boxes of one local tensor. Nothing is communicated.
"""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import torch

from ckptkit.io.torch_tensors import DTYPES, no_memory
from ckptkit.model.box import Box
from threefold.errors import UserError

Spans = tuple[tuple[int, int], ...]  # [start, stop) of a global dim, in the order of the local one
# torch's dtypes -> safetensors' names; elements of other dtypes are stored as bytes, with a dim more
STORED = {name: stored[0] for name, stored in DTYPES.items() if name != "uint16"}


@dataclass(frozen=True, slots=True)
class Part:
    """A box of the global tensor, and where it is in the local one: the first index of each dim."""

    box: Box
    at: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor as a checkpoint sees it: the dtype and global shape it is stored in, and the parts held here."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


def is_dtensor(tensor: Any) -> bool:
    """Return whether a tensor is a DTensor; without importing what it is, which takes a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor on this rank, without its gradient."""
    local: Any = tensor.detach()
    return local.to_local() if is_dtensor(local) else local  # type: ignore[no-any-return]


def held(path: str, tensor: torch.Tensor) -> Held:
    """Return how a tensor is stored, and what of it is here; UserError if its memory is not its elements."""
    local: Any = local_of(tensor)
    if absent := no_memory(local):
        raise UserError(f"{path} is {absent[0]}", hint=absent[1])
    shape = tuple(tensor.shape)
    parts = _dtensor_parts(path, tensor, local) if is_dtensor(tensor) else _whole(shape)
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype in STORED:
        return Held(STORED[dtype], shape, parts)
    size = tensor.element_size()
    wide = [Part(Box((*p.box.offset, 0), (*p.box.shape, size)), (*p.at, 0)) for p in parts]
    return Held("U8", (*shape, size), tuple(wide))


def as_stored(local: torch.Tensor) -> torch.Tensor:
    """Return local memory with the dims it is stored in: of a dtype of its own, or as bytes."""
    if str(local.dtype).removeprefix("torch.") in STORED:
        return local
    if local.is_complex():
        local = torch.view_as_real(local).contiguous()
        return local.view(torch.uint8).reshape(*local.shape[:-1], -1)
    return local.contiguous().unsqueeze(-1).view(torch.uint8)


def region(local: torch.Tensor, part: Part) -> torch.Tensor:
    """Return the view of local memory that a part is."""
    for dim, (at, size) in enumerate(zip(part.at, part.box.shape, strict=True)):
        if size != local.shape[dim]:
            local = local.narrow(dim, at, size)
    return local


@lru_cache(1 << 14)
def _whole(shape: tuple[int, ...]) -> tuple[Part, ...]:
    zero = (0,) * len(shape)
    return (Part(Box(zero, shape), zero),)


def _dtensor_parts(path: str, tensor: Any, local: torch.Tensor) -> tuple[Part, ...]:
    mesh, placements = tensor.device_mesh, tuple(tensor.placements)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()
    cuts = []
    for axis, placement in enumerate(placements):
        kind = type(placement).__name__
        if kind == "Replicate":
            continue
        if kind not in ("Shard", "_StridedShard"):
            raise UserError(
                f"{path} is a DTensor placed {placement}, which no checkpoint can hold",
                hint="redistribute it first: tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)",
            )
        cuts.append((placement.dim, int(getattr(placement, "split_factor", 1)), mesh.size(axis), coordinate[axis]))
    parts, shape = _cut(tuple(tensor.shape), tuple(cuts))
    if (bool(parts) != bool(local.numel())) or (parts and shape != tuple(local.shape)):
        raise UserError(
            f"{path} is a DTensor of local shape {list(local.shape)}, its placements {placements} make {list(shape)}",
            hint="make it by distribute_tensor, fully_shard or parallelize_module",
        )
    return parts


@lru_cache(1 << 14)
def _cut(
    shape: tuple[int, ...], cuts: tuple[tuple[int, int, int, int], ...]
) -> tuple[tuple[Part, ...], tuple[int, ...]]:
    """Return the parts and the local shape that cuts of (dim, split factor, number of ranks, this rank) leave."""
    spans: list[Spans] = [((0, size),) for size in shape]
    for dim, factor, count, index in _in_order(cuts):
        pieces = [_chunk(piece, count, index) for piece in (_chunk(spans[dim], factor, i) for i in range(factor))]
        spans[dim] = _joined(span for piece in pieces for span in piece)
    lengths = tuple(sum(stop - start for start, stop in each) for each in spans)
    if 0 in lengths:
        return (), lengths
    placed = []
    for each in spans:
        ends, at = [], 0
        for start, stop in each:
            ends.append((start, stop - start, at))
            at += stop - start
        placed.append(ends)
    parts = [
        Part(Box(tuple(a for a, _, _ in each), tuple(n for _, n, _ in each)), tuple(at for _, _, at in each))
        for each in product(*placed)
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
    found, at = [], 0
    for start, stop in spans:
        a, b = max(low - at, 0), min(high - at, stop - start)
        if a < b:
            found.append((start + a, start + b))
        at += stop - start
    return tuple(found)


def _joined(spans: Iterator[tuple[int, int]]) -> Spans:
    """Return the spans with neighbours made one."""
    found: list[tuple[int, int]] = []
    for start, stop in spans:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)
