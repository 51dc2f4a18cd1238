"""Chunk: what one file holds, or one rank wants, of a global tensor.

A chunk is an n-D box of the global tensor with a range [start, stop) of row-major positions *inside that box*; a
whole box is the range [0, numel). Ranges express ZeRO intervals, boxes express tensor-parallel cuts.
"""

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Box:
    """An axis-aligned n-D box in a global tensor's index space."""

    offset: tuple[int, ...]  # the first index in each dim
    shape: tuple[int, ...]  # the length in each dim

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "Box":
        """Return the box of a whole tensor."""
        return cls((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """Return the elements of the box."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk with its elements in memory: what a rank saves, or the place a restore fills.

    `data` is a contiguous array or tensor of stop - start elements, of one dim or as many as the box has: numpy, or
    torch on CPU or CUDA (bfloat16 included). A save reads it, a restore writes into it.
    """

    name: str
    box: Box
    start: int
    stop: int
    data: Any

    @classmethod
    def whole(cls, name: str, box: Box, data: Any) -> "Piece":
        """Return a piece that covers its whole box."""
        return cls(name, box, 0, box.numel, data)
