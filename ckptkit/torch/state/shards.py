"""Shards: plain tensors that say themselves which slices of a global tensor they hold.

Four attributes say it, those of `torch.distributed.checkpoint.CheckpointableTensor`: the `global_shape`, and of each
slice its `global_offsets`, `local_offsets` and `local_sizes`. Memory outside the slices is padding.
"""

import math
from typing import Any

import torch

from ckptkit.model.mesh_cut import MeshPart
from ckptkit.model.tensor import Box
from threefold.errors import UserError

OF_SLICES = ("global_offsets", "local_offsets", "local_sizes")
FIELDS = ("global_shape", *OF_SLICES)
HINT = "set them as torch.distributed.checkpoint.CheckpointableTensor names them"


def is_shard(tensor: Any) -> bool:
    """Return whether a tensor says which slices of a global one it holds."""
    return hasattr(tensor, "global_shape") and all(hasattr(tensor, name) for name in OF_SLICES)


def whole_shape(tensor: Any) -> tuple[int, ...]:
    """Return the shape of the global tensor, which for most tensors is their own."""
    return tuple(tensor.global_shape if is_shard(tensor) else tensor.shape)


def shard_parts(path: str, tensor: Any) -> tuple[MeshPart, ...]:
    """Return the slices that hold elements; UserError if they are not of the global tensor, or not of this memory."""
    shape, here, parts = whole_shape(tensor), tuple(tensor.shape), []
    for number, (offset, at, size) in enumerate(_slices(path, tensor)):
        for name, begin, limit in (("global_shape", offset, shape), ("memory", at, here)):
            if not _is_inside(begin, size, limit):
                what = f"slice {number} of shape {list(size)} at {list(begin)}"
                raise UserError(f"{path}: {what} is outside its {name} {list(limit)}", hint=HINT)
        if 0 not in size:
            parts.append(MeshPart(Box(offset, size), at))
    return tuple(parts)


def shard_like(path: str, tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a tensor of an optimizer's state of a parameter as the slices that this is, with the same memory.

    UserError for one of another shape, of which nobody knows what part of what it is.
    """
    if not is_shard(parameter) or is_shard(tensor):
        return tensor
    if tensor.shape != parameter.shape:
        here = sum(part.box.numel for part in shard_parts(path, parameter))
        if tensor.numel() == 1 or here == math.prod(whole_shape(parameter)):
            return tensor
        raise UserError(
            f"{path} has shape {list(tensor.shape)}, its parameter holds slices of {list(whole_shape(parameter))} in "
            f"memory of {list(parameter.shape)}: which part it is cannot be seen",
            hint=f"give it {', '.join(FIELDS)} of its own",
        )
    shown = tensor.detach()
    for name in FIELDS:
        setattr(shown, name, getattr(parameter, name))
    return shown


def _slices(path: str, tensor: Any) -> list[tuple[tuple[int, ...], ...]]:
    """Return the offset in the global tensor, that in memory, and the shape of each slice."""
    try:
        fields = [[tuple(map(int, each)) for each in getattr(tensor, name)] for name in OF_SLICES]
    except (TypeError, ValueError):
        raise UserError(f"{path}: its {', '.join(OF_SLICES)} are not tuples of ints", hint=HINT) from None
    if len({*map(len, fields)}) > 1:
        said = ", ".join(f"{len(each)} {name}" for name, each in zip(OF_SLICES, fields, strict=True))
        raise UserError(f"{path} has {said}: each slice has one of each", hint=HINT)
    return list(zip(*fields, strict=True))


def _is_inside(begin: tuple[int, ...], size: tuple[int, ...], limit: tuple[int, ...]) -> bool:
    return len(begin) == len(size) == len(limit) and all(
        low >= 0 <= length and low + length <= end for low, length, end in zip(begin, size, limit, strict=True)
    )
