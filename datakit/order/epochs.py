"""Epochs: the order of each source's rows in each of its epochs, with random access: no table, no start-up, no memory.

An order is a keyed permutation of the rows, or one for storage where single rows cannot pay. Then rows that follow each
other make blocks, of `block_rows`. A keyed permutation orders the blocks, and cuts them into windows; another one
orders the rows of each window. So an epoch reads every row once, and at any time one window's blocks alone. With 10
rows, blocks of 2 and windows of 2 blocks, the blocks may come as 3 0 | 4 2 | 1: then the first four samples are rows 6,
7, 0 and 1 in some order. The last block may be shorter.

A window has at most 64 blocks and at most a 64th of the source, one block at least: a cache of a tenth of the source
holds the window that is read, the next one, and the indices. Orders and their inverses: csrc/datakit/epochs.cpp.
"""

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from datakit.format.native import EPOCHS, address_of, library
from datakit.format.shard import Int64s

_MAX_NAME_BYTES = 180  # with an epoch and a window, at most 240


class Epochs:
    """The orders of several sources' elements, one an epoch: that of epoch 7 of a source named (b"a/", b"/b") has the
    name b"a/7/b". Safe to use from several threads.
    """

    def __init__(
        self, names: Sequence[tuple[bytes, bytes]], sizes: Sequence[int], block_rows: Sequence[int] = ()
    ) -> None:
        """Take what is before and after an epoch's number in its name, 180 bytes at most, and the elements of each.

        With `block_rows` they are ordered in blocks of so many, one number a source. A size is at most 2^62.
        """
        assert all(len(before) + len(after) <= _MAX_NAME_BYTES for before, after in names), "names are short"
        self._sizes = [max(size, 1) for size in sizes]
        self._names = [(array("b", before + b" "), array("b", after + b" ")) for before, after in names]  # of any size
        rows = [
            (before.buffer_info()[0], len(before) - 1, after.buffer_info()[0], len(after) - 1, size, min(block, size))
            for (before, after), size, block in zip(self._names, self._sizes, block_rows or [0] * len(names))
        ]
        self._native = np.array(rows, EPOCHS)

    def elements(self, sources: Int64s, numbers: Int64s) -> Int64s:
        """Return of each of some sources the element that is its `numbers[i]`-th, epoch after epoch."""
        elements = np.empty(len(sources), np.int64)
        library().dk_elements(
            address_of(self._native), address_of(sources), address_of(numbers), len(sources), address_of(elements)
        )
        return elements

    def positions(self, source: int, epoch: int, elements: npt.ArrayLike) -> Int64s:
        """Return where these elements of a source come in one epoch of it: `elements` inverted."""
        asked = np.array(elements, np.int64, ndmin=1)
        if not len(asked):
            return asked
        assert 0 <= asked.min() <= asked.max() < self._sizes[source], "elements are below the size"
        positions = np.empty_like(asked)
        library().dk_positions(
            address_of(self._native[source : source + 1]), epoch, address_of(asked), len(asked), address_of(positions)
        )
        return positions
