"""ZeRO bucket arithmetic: where tensors lie in one flat buffer, and which part of each one a data-parallel rank owns.

Tensors stand in a bucket in order, each at a 64-byte aligned offset. The bucket, padded to a multiple of dp * 64 bytes,
is cut into dp equal intervals. Positions and sizes are in elements. Pure; O(tensors).
"""

from bisect import bisect_right
from collections.abc import Sequence

ALIGNMENT_BYTES = 64


def bucket_offsets(numels: Sequence[int], itemsize: int) -> tuple[list[int], int]:
    """The offset of each tensor in the bucket, and the bucket's unpadded size."""
    offsets, end, step = [], 0, _alignment(itemsize)
    for numel in numels:
        offset = -(-end // step) * step
        offsets.append(offset)
        end = offset + numel
    return offsets, end


def padded_size(total: int, dp_size: int, itemsize: int) -> int:
    """The bucket's size once every one of dp_size equal intervals starts at a 64-byte aligned position."""
    step = _alignment(itemsize) * dp_size
    return -(-total // step) * step


def shard_interval(total: int, dp_size: int, dp_rank: int, itemsize: int) -> tuple[int, int]:
    """The interval [start, stop) of the padded bucket that `dp_rank` owns; the last ones may reach past `total`."""
    assert 0 <= dp_rank < dp_size, f"dp rank {dp_rank} of {dp_size}"
    length = padded_size(total, dp_size, itemsize) // dp_size
    return dp_rank * length, (dp_rank + 1) * length


def overlaps(offsets: Sequence[int], numels: Sequence[int], start: int, stop: int) -> list[tuple[int, int, int]]:
    """Which positions [a, b) of each tensor the interval [start, stop) covers, as (tensor index, a, b), none empty."""
    found = []
    for index in range(max(bisect_right(offsets, start) - 1, 0), len(offsets)):
        offset = offsets[index]
        if offset >= stop:
            break
        a, b = max(start - offset, 0), min(stop - offset, numels[index])
        if a < b:
            found.append((index, a, b))
    return found


def _alignment(itemsize: int) -> int:
    assert itemsize in (1, 2, 4, 8), f"an item of {itemsize} bytes"
    return ALIGNMENT_BYTES // itemsize
