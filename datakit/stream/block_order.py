"""BlockOrder: an order of a store's rows for storage where single rows cannot pay, with random access as before.

Rows that follow each other make blocks, of `block_rows`. A keyed permutation orders the blocks, and cuts them into
windows of `num_blocks`; another one orders the rows of each window. So an epoch reads every row once, and at any time
one window's blocks alone. With 10 rows, blocks of 2 and windows of 2 blocks, the blocks may come as 3 0 | 4 2 | 1: then
the first four samples are rows 6, 7, 0 and 1 in some order.

A window has at most MAX_WINDOW_BLOCKS blocks and at most one WINDOW_PART-th of the store, one block at least: a cache
of a tenth of the store holds the window that is read, the next one, and the indices. The last block may be shorter.
Memory is a few hundred bytes, and nothing is made at the start.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from datakit.store.shard import Int64s
from datakit.stream.permutation import Permutation, elements_at

MAX_WINDOW_BLOCKS, WINDOW_PART = 64, 64
_MAX_KEPT_WINDOWS = 64


class BlockOrder:
    """One order of rows 0 to size - 1, chosen by `key`."""

    def __init__(self, size: int, key: bytes, block_rows: int) -> None:
        """`size` is from 1 to 2^62."""
        self.size, self._key, self._block_rows = size, key, block_rows
        count = -(-size // block_rows)
        self._num_blocks = max(1, min(MAX_WINDOW_BLOCKS, count // WINDOW_PART))
        self.blocks = Permutation(count, key + b"/blocks")
        self._missing = count * block_rows - size  # rows that the last block lacks
        [self._short] = self.blocks.positions([count - 1]).tolist()  # where that block comes
        self._short_window, slot = divmod(self._short, self._num_blocks)
        self._short_end = (slot + 1) * block_rows - self._missing  # the rows of its window up to its end
        self._windows: dict[int, Permutation] = {}
        self._latest = 0, 0, self.blocks, 0  # a window's first position, the one after its last, its order, its number

    def start(self, position: int) -> tuple[Permutation, int, int]:
        """Return the order of the rows in the window of a position, the place in it, and the window."""
        first, stop, order, window = self._latest
        if not first <= position < stop:
            self._latest = first, stop, order, window = self._window(position)
        return order, position - first, window

    def split(self, window: int, place: int) -> tuple[int, int]:
        """Return of a row of a window, counted block by block, the place of its block among all, and its row in it."""
        if window == self._short_window and place >= self._short_end:
            place += self._missing
        slot, row = divmod(place, self._block_rows)
        return window * self._num_blocks + slot, row

    def element(self, block: int, row: int) -> int:
        """Return the row of the store that is a row of a block."""
        return block * self._block_rows + row

    def positions(self, elements: npt.ArrayLike) -> Int64s:
        """Return where these rows come: the inverse of `block_elements_at`."""
        found = []
        for element in np.array(elements, np.int64, ndmin=1).tolist():
            block, row = divmod(element, self._block_rows)
            [at] = self.blocks.positions([block]).tolist()
            window, slot = divmod(at, self._num_blocks)
            place = slot * self._block_rows + row
            if window == self._short_window and at > self._short:
                place -= self._missing
            first, _ = self._bounds(window)
            order, _, _ = self.start(first)
            [inside] = order.positions([place]).tolist()
            found.append(first + inside)
        return np.array(found, np.int64)

    def _window(self, position: int) -> tuple[int, int, Permutation, int]:
        """Return the window of a position: its first position, the one after its last, its order and its number."""
        width = self._num_blocks * self._block_rows
        window = position // width
        if position >= (self._short_window + 1) * width - self._missing:
            window = (position + self._missing) // width
        first, size = self._bounds(window)
        order = self._windows.get(window)
        if order is None:
            if len(self._windows) >= _MAX_KEPT_WINDOWS:
                self._windows.clear()
            order = self._windows[window] = Permutation(size, self._key + f"/window/{window}".encode())
        return first, first + size, order, window

    def _bounds(self, window: int) -> tuple[int, int]:
        """Return the first position of a window, and its rows."""
        width = self._num_blocks * self._block_rows
        first = window * width - (self._missing if window > self._short_window else 0)
        stop = min((window + 1) * width, self.blocks.size * self._block_rows)
        return first, stop - (self._missing if window >= self._short_window else 0) - first


def block_elements_at(places: Sequence[tuple[BlockOrder, int]]) -> list[int]:
    """Return the row at each of these positions of orders."""
    starts = [order.start(position) for order, position in places]
    insides = elements_at([(rows, place) for rows, place, _ in starts])
    slots = [order.split(window, place) for (order, _), (_, _, window), place in zip(places, starts, insides)]
    blocks = elements_at([(order.blocks, slot) for (order, _), (slot, _) in zip(places, slots)])
    return [order.element(block, row) for (order, _), block, (_, row) in zip(places, blocks, slots)]
