"""Slabs: a pass over tensors of a checkpoint, one after the other, in batches of bounded size.

A slab is a range of a tensor's global row-major positions; what a box holds of it is one range of the box's positions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckptkit.model.tensor import ITEMSIZE, Box, TensorInfo

SLAB_BYTES = 64 << 20
STEP_BYTES = 1 << 20  # tensors are divided at multiples of this, so that hashing sees whole blocks


@dataclass(frozen=True, slots=True)
class Slab:
    """Elements [start, stop) of a tensor, in global row-major positions."""

    info: TensorInfo
    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        return (self.stop - self.start) * ITEMSIZE[self.info.dtype]


def slab_batches(tensors: Sequence[TensorInfo], max_bytes: int = SLAB_BYTES) -> Iterator[list[Slab]]:
    """Yield all elements of all tensors that hold data, in the given order; each batch has at most max_bytes."""
    assert max_bytes >= STEP_BYTES, "a batch holds at least one step"
    batch: list[Slab] = []
    room = max_bytes
    for info in tensors:
        if info.placement.tied_to is not None:
            continue
        itemsize, numel, start = ITEMSIZE[info.dtype], info.numel, 0
        while start < numel:
            rest = (numel - start) * itemsize
            taken = rest if rest <= room else room // STEP_BYTES * STEP_BYTES
            if taken:
                batch.append(Slab(info, start, start + taken // itemsize))
                start += taken // itemsize
                room -= taken
            if start < numel or room < STEP_BYTES:
                yield batch
                batch, room = [], max_bytes
    if batch:
        yield batch


def positions_before(box: Box, shape: Sequence[int], position: int) -> int:
    """Return how many elements of a box come before a row-major position of the global tensor."""
    count, inner, rest, size = 0, box.numel, position, 1
    for length in shape:
        size *= length
    if position >= size:
        return box.numel
    for offset, length, extent in zip(box.offset, box.shape, shape, strict=True):
        if not inner:
            return 0
        size //= extent
        index, rest = divmod(rest, size)
        inner //= length
        count += min(max(index - offset, 0), length) * inner
        if not offset <= index < offset + length:
            break
    return count
