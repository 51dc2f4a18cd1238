"""The normals of `trainer.ops.philox` in plain torch: the operations of csrc/ops/normal.inc in the same order."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trainer.ops.philox import MASK, philox4x32, tensor_key


def normal_reference(
    seed: int, name: str, global_shape: Sequence[int], box_offset: Sequence[int], box_shape: Sequence[int]
) -> Tensor:
    """Return what `normal_` makes of a box, bit for bit, as float64 on the CPU."""
    index = torch.zeros(tuple(box_shape), dtype=torch.int64)
    for dim, (start, size) in enumerate(zip(box_offset, box_shape, strict=True)):
        stride = math.prod(global_shape[dim + 1 :])
        steps = torch.arange(start, start + size) * stride
        index += steps.reshape([-1 if other == dim else 1 for other in range(len(box_shape))])
    return _normals(index, tensor_key(seed, name))


def _normals(index: Tensor, key: int) -> Tensor:
    """Return standard normals of flat indices."""
    zero = torch.zeros_like(index)
    w0, w1, w2, w3 = philox4x32([index & MASK, index >> 32, zero, zero], key & MASK, key >> 32)
    u = (2.0 * (w1 << 20 | w0 >> 12).double() + 1.0) * 2.0**-53
    fraction = ((w3 & 0x3FFFFFFF) << 22 | w2 >> 10).double() * 2.0**-52
    angle = (fraction - 0.5) * (math.pi / 2)
    sine, cosine = angle * _sine_series(angle * angle, 2), _sine_series(angle * angle, 1)
    quarter = w3 >> 30
    turn = torch.where(quarter % 2 == 1, sine, cosine)
    turn = torch.where((quarter == 1) | (quarter == 2), -turn, turn)
    radius = torch.empty_like(u)
    np.sqrt((-2.0 * _log(u)).numpy(), out=radius.numpy())  # torch's root may be a bit off: it takes MKL's where it can
    return radius * turn


def _log(u: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(u)  # mantissa in [0.5, 1)
    is_small = mantissa <= math.sqrt(2) / 2
    mantissa, exponent = torch.where(is_small, 2.0 * mantissa, mantissa), exponent.double() - is_small.double()
    s = (mantissa - 1.0) / (mantissa + 1.0)
    s2, series = s * s, torch.zeros_like(s)
    for n in range(23, 2, -2):
        series = (series + 1.0 / n) * s2
    return exponent * math.log(2) + (2.0 * s + 2.0 * s * series)


def _sine_series(a2: Tensor, first: int) -> Tensor:
    series = torch.zeros_like(a2)
    for n in range(first + 14, first - 1, -2):
        series = (1.0 - series) * a2 * (1.0 / (n * (n + 1)))
    return 1.0 - series
