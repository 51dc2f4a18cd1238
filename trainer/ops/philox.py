"""Initial weights by counter: an element's normal number is a function of (seed, tensor name, flat global index) alone.

So each rank makes its own box of a tensor and no other element, and any layout starts from the same weights. Normals
are made on the CPU in float64, from additions, multiplications, divisions and square roots alone, which IEEE 754 fixes
bit for bit; a CUDA tensor gets a copy. Hence the bits depend on no device, thread count or instruction set.

Sources: Box and Muller, "A Note on the Generation of Random Normal Deviates", 1958; for Philox4x32-10, Salmon et al.,
"Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
"""

import ctypes
import hashlib
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from threefold.errors import UserError
from trainer.ops import native

Words = npt.NDArray[np.uint32]


def normal_(
    tensor: Tensor,
    seed: int,
    name: str,
    global_shape: Sequence[int] | None = None,
    box_offset: Sequence[int] | None = None,
    std: float = 1.0,
) -> Tensor:
    """Fill `tensor` in place with std * normals: it is the box at `box_offset` of the tensor `name` of `global_shape`.

    By default the tensor is whole. Numbers are rounded from float64 to the tensor's dtype, to bf16 through float32 (so
    that a bf16 weight equals its fp32 master rounded). Raises UserError where the box does not lie in the global shape.
    """
    shape = tuple(tensor.shape)
    whole = shape if global_shape is None else tuple(global_shape)
    offset = (0,) * len(whole) if box_offset is None else tuple(box_offset)
    fits = len(shape) == len(whole) == len(offset) and all(
        0 <= start <= total - size for start, size, total in zip(offset, shape, whole, strict=True)
    )
    if not fits:
        raise UserError(f"normal_: a box {list(shape)} at {list(offset)} does not lie in {name} {list(whole)}")
    box = torch.empty(shape, dtype=tensor.dtype)
    dims = [(ctypes.c_int64 * len(shape))(*values) for values in (shape, whole, offset)]
    native.call("normal", box, box.data_ptr(), tensor_key(seed, name), len(shape), *dims, std)
    with torch.no_grad():
        return tensor.copy_(box)


def normal_reference(
    seed: int, name: str, global_shape: Sequence[int], box_offset: Sequence[int], box_shape: Sequence[int]
) -> npt.NDArray[np.float64]:
    """The same standard normals in numpy, bit for bit, as float64."""
    index = np.zeros(tuple(box_shape), np.uint64)
    for axis, (start, size) in enumerate(zip(box_offset, box_shape, strict=True)):
        stride = math.prod(global_shape[axis + 1 :])
        steps = np.arange(start, start + size, dtype=np.uint64) * np.uint64(stride)
        index += steps.reshape([-1 if other == axis else 1 for other in range(len(box_shape))])
    return normals(index, tensor_key(seed, name))


def tensor_key(seed: int, name: str) -> int:
    """The 64-bit Philox key of a tensor: the block of counter blake2b-128(name) under the seed."""
    if not 0 <= seed < 1 << 64:
        raise UserError(f"the seed is {seed}, not in [0, 2^64)")
    counter = np.frombuffer(hashlib.blake2b(name.encode(), digest_size=16).digest(), "<u4")
    words = philox4x32(counter, np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32))
    return int(words[0]) | int(words[1]) << 32


def philox4x32(counter: Words, key: Words) -> Words:
    """Philox4x32-10: random words [..., 4] of counters [..., 4] under a key [2]."""
    c0, c1, c2, c3 = (counter[..., word].astype(np.uint64) for word in range(4))
    k0, k1 = (int(word) for word in key)
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        product0, product1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1 = (product1 >> np.uint64(32)) ^ c1 ^ np.uint64(k0), product1 & low
        c2, c3 = (product0 >> np.uint64(32)) ^ c3 ^ np.uint64(k1), product0 & low
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], -1).astype(np.uint32)


def normals(index: npt.NDArray[np.uint64], key: int) -> npt.NDArray[np.float64]:
    """Standard normals of flat indices under a 64-bit key, with the same operations in the same order as the kernel."""
    zero = np.zeros_like(index)
    counter = np.stack([index & np.uint64(0xFFFFFFFF), index >> np.uint64(32), zero, zero], -1).astype(np.uint32)
    words = philox4x32(counter, np.array([key & 0xFFFFFFFF, key >> 32], np.uint32)).astype(np.uint64)
    first, second = (words[..., word] | words[..., word + 1] << np.uint64(32) for word in (0, 2))
    u = (2.0 * (first >> np.uint64(12)).astype(np.float64) + 1.0) * 2.0**-53
    fraction = (second << np.uint64(2) >> np.uint64(12)).astype(np.float64) * 2.0**-52
    angle = (fraction - 0.5) * (math.pi / 2)
    sine, cosine = angle * _sine_series(angle * angle, 2), _sine_series(angle * angle, 1)
    quarter = (second >> np.uint64(62)).astype(np.int64)
    turn = np.choose(quarter, [cosine, -sine, -cosine, sine])
    values: npt.NDArray[np.float64] = np.sqrt(-2.0 * _log(u)) * turn
    return values


def _log(u: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    mantissa, exponent = np.frexp(u)  # mantissa in [0.5, 1)
    is_small = mantissa <= 1.4142135623730951 / 2
    mantissa, exponent = np.where(is_small, 2 * mantissa, mantissa), exponent - is_small
    s = (mantissa - 1.0) / (mantissa + 1.0)
    s2, series = s * s, np.zeros_like(s)
    for n in range(23, 2, -2):
        series = (series + 1.0 / n) * s2
    return exponent * 0.6931471805599453 + (2.0 * s + 2.0 * s * series)


def _sine_series(a2: npt.NDArray[np.float64], first: int) -> npt.NDArray[np.float64]:
    series = np.zeros_like(a2)
    for n in range(first + 14, first - 1, -2):
        series = (1.0 - series) * a2 * (1.0 / (n * (n + 1)))
    return 1.0 - series
