"""Split masters: an fp32 number as the bf16 weight that it rounds to, and the 16 bits below it.

Read as a signed number, the low bits added to the bf16 above them are the fp32 again. Only a number halfway between two
bf16 would lack a bit: it first goes one unit of fp32 toward the one that it rounds to.
"""

import torch
from torch import Tensor

LOW = torch.int16  # the dtype of the low bits


def joined(weights: Tensor, low: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the fp32 numbers whose bf16 and whose low bits these are, in `out` if it is given."""
    bits = (weights.view(LOW).to(torch.int32) << 16).add_(low)
    return bits.view(torch.float32) if out is None else out.copy_(bits.view(torch.float32))


def split_into(weights: Tensor, low: Tensor, numbers: Tensor) -> None:
    """Write fp32 numbers as bf16 weights and low bits."""
    bits = numbers.view(torch.int32)
    is_halfway, goes_up = (bits & 0xFFFF) == 0x8000, (bits >> 16) & 1  # to the even one
    bits = bits + is_halfway * (2 * goes_up - 1)
    weights.copy_(bits.view(torch.float32))
    low.copy_(bits)  # the bits above are cut off


def whole_master(master: Tensor, published: Tensor | None) -> Tensor:
    """Return a master itself, or if it is split a new tensor of what the published weight and its low bits are."""
    if master.dtype != LOW:
        return master
    assert published is not None, "the high bits"
    return joined(published, master)


def publish(whole: Tensor, master: Tensor, published: Tensor | None) -> None:
    """Write a `whole_master` that was updated to the weight, and to its low bits if it is split."""
    if whole is not master:
        assert published is not None, "the high bits"
        split_into(published, master, whole)
    elif published is not None:
        published.copy_(whole)
