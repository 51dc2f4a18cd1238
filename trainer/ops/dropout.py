"""Dropout whose mask is a function of where an element lies in the global batch: any cut of the batch gives the same.

Whether the element at global (sample, position, feature) is dropped depends on these and on (seed, step, layer, site),
and on nothing else: not on micro-batches, ranks, threads or the device. The backward makes the mask again, so nothing is
saved. Philox4x32-10 by counter: key = Philox(counter (step, layer, site), key seed); four neighbouring features share the
block of counter (feature // 4, position, sample); an element is kept when word feature % 4 is >= floor(p * 2^32).
"""

import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor

from threefold.errors import UserError
from trainer.ops import native
from trainer.ops.philox import philox4x32


class _Mask(ctypes.Structure):
    _fields_ = (
        ("seed", ctypes.c_uint64),
        ("step", ctypes.c_uint64),
        ("layer", ctypes.c_uint32),
        ("site", ctypes.c_uint32),
        ("first_sample", ctypes.c_uint64),
        ("first_position", ctypes.c_uint64),
        ("first_feature", ctypes.c_uint64),
        ("probability", ctypes.c_double),
    )


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
    restarts at a document), `first_feature` the global feature of x[:, :, 0]: each is 0 where x holds the dim whole.
    `site` numbers the dropouts inside a layer.
    """
    if x.dim() != 3:
        raise UserError(f"dropout: x is [batch, positions, features], not {list(x.shape)}")
    if not 0 <= p < 1:
        raise UserError(f"dropout: the probability is {p}, not in [0, 1)")
    numbers = {"seed": seed, "step": step, "layer": layer, "site": site, "first_sample": first_sample}
    numbers |= {"first_position": first_position, "first_feature": first_feature}
    bits = {"layer": 32, "site": 32, "first_position": 32, "first_feature": 34}
    for name, value in numbers.items():
        if not 0 <= value < 1 << bits.get(name, 63):
            raise UserError(f"dropout: {name} is {value}, not in [0, 2^{bits.get(name, 63)})")
    if p == 0:
        return x
    return torch.ops.threefold.dropout(x, p, seed, step, layer, site, first_sample, first_position, first_feature)


def dropout_reference(
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
    """The same in numpy and plain torch, bit for bit."""
    step_words, seed_words = divmod(step, 1 << 32)[::-1], divmod(seed, 1 << 32)[::-1]
    key = philox4x32(np.array([*step_words, layer, site], np.uint32), np.array(seed_words, np.uint32))[:2]
    samples, positions, features = (
        np.arange(first, first + size, dtype=np.uint64)
        for first, size in zip((first_sample, first_position, first_feature), x.shape, strict=True)
    )
    sample, position, group = np.meshgrid(samples, positions, features // 4, indexing="ij")
    counters = np.stack([group, position, sample & 0xFFFFFFFF, sample >> 32], -1).astype(np.uint32)
    words = np.take_along_axis(philox4x32(counters, key), (features % 4).astype(np.int64)[None, None, :, None], -1)
    kept = torch.from_numpy(words[..., 0] >= np.uint32(int(p * 2**32))).to(x.device)
    wide = x if x.dtype == torch.float64 else x.float()
    return torch.where(kept, wide * (1 / (1 - p)), 0).to(x.dtype)


def _apply(x: Tensor, p: float, *numbers: int) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    mask = _Mask(*numbers, p)
    native.call("dropout", x, x.data_ptr(), y.data_ptr(), *x.shape, ctypes.addressof(mask))
    return y


def _fake(x: Tensor, p: float, *numbers: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.mask = inputs[1:]


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    return torch.ops.threefold.dropout(dy, *ctx.mask), *[None] * len(ctx.mask)


_OPS = torch.library.Library("threefold", "FRAGMENT")
_OPS.define(
    "dropout(Tensor x, float p, int seed, int step, int layer, int site, int first_sample, int first_position, "
    "int first_feature) -> Tensor"
)
for _device in ("CPU", "CUDA"):
    _OPS.impl("dropout", _apply, _device)
torch.library.register_fake("threefold::dropout", _fake, lib=_OPS)
torch.library.register_autograd("threefold::dropout", _differentiate, setup_context=_save, lib=_OPS)
