"""Boxes: which parts of a global tensor a rank holds, for a plain tensor, a shard, and a DTensor of any placements."""

import sys
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import nn

from ckptkit.io.torch_tensors import STORED, no_memory
from ckptkit.model.mesh_cut import MeshPart, mesh_cut
from ckptkit.model.tensor import Box
from ckptkit.torch.state.shards import is_shard, shard_parts, whole_shape
from threefold.errors import UserError

PLAIN: frozenset[type] = frozenset((torch.Tensor, nn.Parameter))  # which wrap nothing


@dataclass(frozen=True, slots=True)
class HeldParts:
    """A tensor as a checkpoint sees it: the dtype and global shape it is stored in, and the parts held here."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[MeshPart, ...]


def is_dtensor(tensor: Any) -> bool:
    """Return whether a tensor is a DTensor; without importing what it is, which takes a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_cut(tensor: Any) -> bool:
    """Return whether a tensor is a part of a global one, which it names."""
    return is_dtensor(tensor) or is_shard(tensor)


def dtype_of(value: Any) -> str | None:
    """Return the name of a tensor's dtype, None for what is not a tensor, or one of several that it wraps."""
    is_one = isinstance(value, torch.Tensor) and inner_tensors(value) is None
    return name_of(value.dtype) if is_one else None


def inner_tensors(value: Any) -> dict[str, torch.Tensor] | None:
    """Return the tensors that a wrapper subclass is made of, by name, as torchao's are; None for anything else.

    Filling them in place fills it.
    """
    kind: Any = type(value)
    if kind in PLAIN or not isinstance(value, torch.Tensor) or is_cut(value):
        return None
    if kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__ or not hasattr(kind, "__tensor_flatten__"):
        return None
    return None if value.is_nested else {name: getattr(value, name) for name in kind.__tensor_flatten__(value)[0]}


@cache
def stored_dtype(dtype: torch.dtype) -> str | None:
    """Return what a checkpoint calls a dtype, None for one whose elements are stored as bytes."""
    return STORED.get(name_of(dtype))


@cache
def name_of(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype."""
    return str(dtype).removeprefix("torch.")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor on this rank, without its gradient."""
    local: Any = tensor.detach()
    return local if type(tensor) in PLAIN or not is_dtensor(local) else local.to_local()  # type: ignore[no-any-return]


def held_of(path: str, tensor: torch.Tensor, local: Any) -> HeldParts:
    """Return how a tensor is stored, and what of it, `local`, is here; UserError if its memory is not its elements."""
    if is_cut(tensor) and inner_tensors(local) is not None:
        kind = "DTensor" if is_dtensor(tensor) else "shard"
        raise UserError(
            f"{path} is a {kind} of a {type(local).__name__}, which wraps other tensors",
            hint="save the model before quantize_(model, ...); optimizers of plain states are those of torch.optim",
        )
    if not _is_common(local) and (absent := no_memory(local)):
        raise UserError(f"{path} is {absent[0]}", hint=absent[1])
    if is_shard(tensor):
        return _as_held(tensor.dtype, whole_shape(tensor), shard_parts(path, tensor))
    if not is_dtensor(tensor):
        return _held_whole(tensor.dtype, tensor.shape)
    return _as_held(tensor.dtype, tensor.shape, _dtensor_parts(path, tensor, local))


def _is_common(local: Any) -> bool:
    """Return whether a tensor surely has its elements in memory, seen at few looks: a load has very many tensors."""
    return (
        type(local) in PLAIN and not local.is_nested and local.layout is torch.strided
        and (local.is_cpu or local.is_cuda) and stored_dtype(local.dtype) is not None
        and not local.is_neg() and local.data_ptr() != 0
    )  # fmt: skip


def as_stored(local: torch.Tensor) -> torch.Tensor:
    """Return local memory with the dims it is stored in: of a dtype of its own, or as bytes."""
    if stored_dtype(local.dtype):
        return local
    if local.is_complex():
        return torch.view_as_real(local).contiguous().view(torch.uint8)
    return local.contiguous().unsqueeze(-1).view(torch.uint8)


def flat_of(local: torch.Tensor) -> torch.Tensor:
    """Return the elements one after the other: the memory itself, or a copy of what is not contiguous."""
    return local.reshape(-1).contiguous()  # a reshape of one dim keeps its stride


def region(local: torch.Tensor, part: MeshPart) -> torch.Tensor:
    """Return the view of local memory that a part is."""
    if local.shape == part.box.shape:
        return local
    for dim, (at, size) in enumerate(zip(part.at, part.box.shape, strict=True)):
        if size != local.shape[dim]:
            local = local.narrow(dim, at, size)
    return local


@lru_cache(1 << 14)
def _held_whole(dtype: torch.dtype, shape: tuple[int, ...]) -> HeldParts:
    zero = (0,) * len(shape)
    return _as_held(dtype, shape, (MeshPart(Box(zero, tuple(shape)), zero),))


def _as_held(dtype: torch.dtype, shape: tuple[int, ...], parts: tuple[MeshPart, ...]) -> HeldParts:
    if stored := stored_dtype(dtype):
        return HeldParts(stored, tuple(shape), parts)
    size = dtype.itemsize
    wide = [MeshPart(Box((*p.box.offset, 0), (*p.box.shape, size)), (*p.at, 0)) for p in parts]
    return HeldParts("U8", (*shape, size), tuple(wide))


def _dtensor_parts(path: str, tensor: Any, local: torch.Tensor) -> tuple[MeshPart, ...]:
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
    parts, shape = mesh_cut(tuple(tensor.shape), tuple(cuts))
    if (bool(parts) != bool(local.numel())) or (parts and shape != tuple(local.shape)):
        raise UserError(
            f"{path} is a DTensor of local shape {list(local.shape)}, its placements {placements} make {list(shape)}",
            hint="make it by distribute_tensor, fully_shard or parallelize_module",
        )
    return parts
