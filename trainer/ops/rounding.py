"""Gradients in eight bits, as they travel to be summed: blocks with a scale each, rounded at random by place.

A number between two steps of its block becomes the upper one as often as it is near that, so that the mean of many
roundings is the number. What is drawn for an element is a function of a key, of three words and of its place in its
bucket, and of nothing else. A block of which some number is not finite arrives with none that is.

Source: Alistarh and others, "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", 2017.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from trainer.ops.philox import philox4x32

BLOCK = 128  # elements of one scale
AT_ONCE = 1 << 22  # elements whose temporaries are there together
STEPS = 127  # from zero to the largest number of a block
PER_COUNTER = 8  # elements that four words of Philox are for, 16 bits each
BYTES_AT_ONCE = 30  # of temporaries, of each element


def packed_bytes(size: int, num_parts: int, itemsize: int) -> int:
    """Return the bytes in which so many elements of an itemsize travel, in parts of whole blocks.

    >>> packed_bytes(1024, 2, 4), packed_bytes(1040, 2, 4)
    (1056, 1320)
    """
    return num_parts * _num_blocks(size // num_parts) * (BLOCK + itemsize)


def rounding_bytes(size: int, num_parts: int, itemsize: int) -> int:
    """Return what packing so many elements takes beside the result, or adding what came up, if that is more."""
    part = size // num_parts
    padded = num_parts * _num_blocks(part) * BLOCK * itemsize if part % BLOCK else 0
    return max(padded + min(size, AT_ONCE) * BYTES_AT_ONCE, part * itemsize)


def packed(
    values: Tensor, num_parts: int, *, first: int, key: tuple[int, int], words: Sequence[int], at_once: int = AT_ONCE
) -> Tensor:
    """Return equal parts of flat values as blocks in eight bits, each block followed by its scale: rows of int8.

    `first` is the place of the first value in its bucket, and a multiple of 8 as the size of a part is; `words` are
    three more that what is drawn depends on.
    """
    part, itemsize = len(values) // num_parts, values.itemsize
    assert part % PER_COUNTER == first % PER_COUNTER == 0, (part, first)
    num_blocks = _num_blocks(part)
    blocks = functional.pad(values.view(num_parts, part), (0, num_blocks * BLOCK - part)).view(-1, BLOCK)
    rows = torch.empty(len(blocks), BLOCK + itemsize, dtype=torch.int8, device=values.device)
    scales = rows[:, BLOCK:].view(values.dtype)
    for start in range(0, len(blocks), at_once // BLOCK):
        some = slice(start, start + at_once // BLOCK)
        scale = _scales(blocks[some])
        numbers = torch.arange(start, start + len(scale), device=values.device)
        places = first + numbers // num_blocks * part + numbers % num_blocks * BLOCK
        steps = (blocks[some] / scale).add_(drawn(places, key, words)).floor_()
        rows[some, :BLOCK] = steps.clamp_(-STEPS, STEPS)
        scales[some] = scale
    return rows


def sum_packed(rows: Tensor, num_parts: int, out: Tensor) -> None:
    """Write the sum of parts that were packed, which are of the size of `out`: one after the other, in its dtype."""
    scales = rows[:, BLOCK:].view(out.dtype).chunk(num_parts)
    for number, (part, scale) in enumerate(zip(rows[:, :BLOCK].chunk(num_parts), scales, strict=True)):
        values = part.to(out.dtype).mul_(scale).view(-1)[: len(out)]
        if number == 0:
            out.copy_(values)
        else:
            out.add_(values)


def _num_blocks(size: int) -> int:
    return -(-size // BLOCK)


def _scales(blocks: Tensor) -> Tensor:
    """Return the step of each block: not finite where one of its numbers is not."""
    return (blocks.abs().amax(1, keepdim=True) / STEPS).clamp_(min=torch.finfo(blocks.dtype).tiny)


def drawn(places: Tensor, key: tuple[int, int], words: Sequence[int]) -> Tensor:
    """Return a number in (0, 1) for each element of the blocks that begin at places of a bucket, [blocks, 128]."""
    counters = places.unsqueeze(1) // PER_COUNTER + torch.arange(BLOCK // PER_COUNTER, device=places.device)
    fours = torch.stack(philox4x32(cast(Any, (counters, *words)), *key), -1)
    halves = torch.stack([fours & 0xFFFF, fours >> 16], -1)
    return halves.view(len(places), BLOCK).to(torch.float32).add_(0.5).mul_(2.0**-16)
