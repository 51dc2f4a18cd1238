"""Dropout whose mask is a function of an element's place in the global batch: the same under any cut of it.

Whether the element at global (sample, position, feature) is dropped depends on these and on (seed, step, layer, site),
and on nothing else: not on micro-batches, ranks, threads or the device. The backward makes the mask again, so nothing
is saved. Under torch.compile the plain form is used, of the same bits.

Philox4x32-10 by counter: the key is the first two words of Philox(counter = (step, layer, site), key = seed); four
neighbouring features share the block of counter (feature // 4, position, sample); an element is kept when its word,
feature % 4, is at least floor(p * 2^32).
"""

import ctypes
from typing import Any, cast

import torch
from torch import Tensor

from threefold.errors import UserError
from trainer.ops import native
from trainer.ops.dtypes import wide_dtype
from trainer.ops.philox import MASK, philox4x32

# the type of each number in C, and what is above it; x may hold no index that is not below it either
_NUMBERS = {
    "seed": (ctypes.c_uint64, 1 << 63),
    "step": (ctypes.c_uint64, 1 << 63),
    "layer": (ctypes.c_uint32, 1 << 32),
    "site": (ctypes.c_uint32, 1 << 32),
    "first_sample": (ctypes.c_uint64, 1 << 63),
    "first_position": (ctypes.c_uint64, 1 << 32),
    "first_feature": (ctypes.c_uint64, 1 << 34),
}


class _Mask(ctypes.Structure):  # op_mask of csrc/ops/ops.h
    _fields_ = (*((name, kind) for name, (kind, _) in _NUMBERS.items()), ("probability", ctypes.c_double))


def dropout(
    x: Tensor,
    p: float,
    *,
    seed: int,
    step: int,
    layer: int,
    site: int,
    first_sample: int,
    first_position: int = 0,
    first_feature: int = 0,
) -> Tensor:
    """Zero each element of x [B, S, D] with probability p and scale the others by 1 / (1 - p); differentiable.

    `first_sample` is the global index of x[0], `first_position` the place of x[:, 0] in its row (not the position that
    restarts at a document), `first_feature` the global feature of x[:, :, 0]: 0 if x holds that dim whole. `site`
    distinguishes the dropouts of a layer. With p = 0 this is x itself. Raises UserError for what is out of range.
    """
    numbers = (seed, step, layer, site, first_sample, first_position, first_feature)
    _check(x, p, numbers)
    if p == 0:
        return x
    if torch.compiler.is_compiling() or native.lacks_kernels(x.device):
        return _plain(x, p, numbers)
    return cast(Tensor, _Dropout.apply(x, _Mask(*numbers, p)))


def dropout_reference(x: Tensor, p: float, **place: int) -> Tensor:
    """Return the same in plain torch, bit for bit, for the same arguments."""
    numbers = tuple(({"first_position": 0, "first_feature": 0} | place)[name] for name in _NUMBERS)
    _check(x, p, numbers)
    return _plain(x, p, numbers)


def _plain(x: Tensor, p: float, numbers: tuple[int, ...]) -> Tensor:
    seed, step, layer, site, *firsts = numbers
    key0, key1, _, _ = philox4x32([step & MASK, step >> 32, layer, site], seed & MASK, seed >> 32)
    indices = [torch.arange(first, first + size, device=x.device) for first, size in zip(firsts, x.shape, strict=True)]
    sample, position, feature = torch.meshgrid(indices, indexing="ij")
    words = torch.stack(philox4x32([feature // 4, position, sample & MASK, sample >> 32], key0, key1), -1)
    word = words.gather(-1, (feature % 4).unsqueeze(-1)).squeeze(-1)
    wide = x.to(wide_dtype(x.dtype))
    return torch.where(word >= int(p * 2**32), wide * (1 / (1 - p)), 0).to(x.dtype)


def _check(x: Tensor, p: float, numbers: tuple[int, ...]) -> None:
    if x.dim() != 3:
        raise UserError(f"dropout: x is [batch, positions, features], not {list(x.shape)}")
    if not 0 <= p < 1:
        raise UserError(f"dropout: the probability is {p}, not in [0, 1)")
    extents = (1, 1, 1, 1, *x.shape)
    for (name, (_, limit)), number, extent in zip(_NUMBERS.items(), numbers, extents, strict=True):
        if not 0 <= number <= limit - extent:
            raise UserError(f"dropout: {name} is {number} for {extent} of them; the indices must lie in [0, {limit})")


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: _Mask) -> Tensor:
        ctx.mask = mask
        x = x.contiguous()
        y = torch.empty_like(x)
        native.call("dropout", x, x.data_ptr(), y.data_ptr(), *x.shape, ctypes.byref(mask))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _Dropout.apply(dy, ctx.mask), None
