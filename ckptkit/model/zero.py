"""ZeRO bucket arithmetic: where tensors lie in one flat buffer, and which part of each one a data-parallel rank owns.

Tensors stand in a bucket in order, each at a 64-byte aligned offset. The bucket, padded to a multiple of dp * 64 bytes,
is cut into dp equal intervals. Positions and sizes are in elements. Pure; O(tensors).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

ALIGNMENT_BYTES = 64


def bucket_offsets(numels: Sequence[int], itemsize: int) -> tuple[list[int], int]:
    """Return the offset of each tensor in the bucket, and the bucket's unpadded size."""
    offsets, end, step = [], 0, _alignment(itemsize)
    for numel in numels:
        offset = -(-end // step) * step
        offsets.append(offset)
        end = offset + numel
    return offsets, end


def padded_size(total: int, dp_size: int, itemsize: int) -> int:
    """Return the bucket's size once every one of dp_size equal intervals starts at a 64-byte aligned position."""
    step = _alignment(itemsize) * dp_size
    return -(-total // step) * step


def shard_interval(total: int, dp_size: int, dp_rank: int, itemsize: int) -> tuple[int, int]:
    """Return the interval [start, stop) of the padded bucket that `dp_rank` owns.

    The last ones may reach past `total`.
    """
    assert 0 <= dp_rank < dp_size, f"dp rank {dp_rank} of {dp_size}"
    length = padded_size(total, dp_size, itemsize) // dp_size
    return dp_rank * length, (dp_rank + 1) * length


def overlaps(offsets: npt.ArrayLike, numels: npt.ArrayLike, start: int, stop: int) -> npt.NDArray[np.int64]:
    """Return which positions [a, b) of each tensor the interval [start, stop) covers.

    Rows of (tensor index, a, b), a < b.
    """
    offsets, numels = np.asarray(offsets, np.int64), np.asarray(numels, np.int64)
    first = max(int(np.searchsorted(offsets, start, "right")) - 1, 0)
    end = max(int(np.searchsorted(offsets, stop, "left")), first)
    a = np.maximum(start - offsets[first:end], 0)
    b = np.minimum(stop - offsets[first:end], numels[first:end])
    kept = a < b
    return np.stack([np.arange(first, end)[kept], a[kept], b[kept]], axis=1)


def _alignment(itemsize: int) -> int:
    assert itemsize in (1, 2, 4, 8), f"an item of {itemsize} bytes"
    return ALIGNMENT_BYTES // itemsize
