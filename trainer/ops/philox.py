"""Initial weights by counter: an element's normal number is a function of (seed, tensor name, flat global index) alone.

So each rank makes its own box of a tensor and no other element, and any layout starts from the same weights. Normals
are made in float64, from additions, multiplications, divisions and square roots alone, which IEEE 754 fixes bit for
bit. Hence the bits depend on no device, thread count or instruction set.

Sources: Box and Muller, "A Note on the Generation of Random Normal Deviates", 1958; for Philox4x32-10, Salmon et al.,
"Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
"""

import ctypes
import hashlib
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from threefold.errors import UserError
from trainer.ops import native

Word = TypeVar("Word", int, Tensor)
MASK = 0xFFFFFFFF  # the low word


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
    that a bf16 weight equals its fp32 master rounded). Raises UserError if the box is not in the global shape.
    """
    shape = tuple(tensor.shape)
    whole = shape if global_shape is None else tuple(global_shape)
    offset = (0,) * len(whole) if box_offset is None else tuple(box_offset)
    fits = len(shape) == len(whole) == len(offset) and all(
        0 <= start <= total - size for start, size, total in zip(offset, shape, whole, strict=True)
    )
    if not fits:
        raise UserError(f"normal_: a box {list(shape)} at {list(offset)} does not lie in {name} {list(whole)}")
    device = torch.device("cpu") if native.lacks_kernels(tensor.device) else tensor.device
    in_place = tensor.is_contiguous() and tensor.device == device
    box = tensor.detach() if in_place else torch.empty(shape, dtype=tensor.dtype, device=device)
    dims = [(ctypes.c_int64 * len(shape))(*values) for values in (shape, whole, offset)]
    native.call("normal", box, box.data_ptr(), tensor_key(seed, name), len(shape), *dims, std)
    if not in_place:
        tensor.detach().copy_(box)
    return tensor


def tensor_key(seed: int, name: str) -> int:
    """Return the 64-bit key of a tensor: the first two words of Philox(counter = blake2b-128(name), key = seed)."""
    if not 0 <= seed < 1 << 64:
        raise UserError(f"the seed is {seed}, not in [0, 2^64)")
    digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
    counter = [int.from_bytes(digest[at : at + 4], "little") for at in range(0, 16, 4)]
    words = philox4x32(counter, seed & MASK, seed >> 32)
    return words[0] | words[1] << 32


def philox4x32(counter: Sequence[Word], key0: int, key1: int) -> tuple[Word, Word, Word, Word]:
    """Philox4x32-10: four random words of a counter of four words; words are ints, or int64 tensors of one shape."""
    c0, c1, c2, c3 = counter
    for _ in range(10):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # in int64 they wrap: only 64 bits of them matter
        c0, c1, c2, c3 = (
            (product1 >> 32) & MASK ^ c1 ^ key0,
            product1 & MASK,
            (product0 >> 32) & MASK ^ c3 ^ key1,
            product0 & MASK,
        )
        key0, key1 = (key0 + 0x9E3779B9) & MASK, (key1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3
