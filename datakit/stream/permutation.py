"""A keyed permutation of 0..n-1 with random access: no table, no start-up, no memory.

A Feistel network over the smallest power of two that holds n, walked along its cycle until it lands below n (less than
two rounds of it on average). Luby and Rackoff 1988; Black and Rogaway 2002, "Ciphers with arbitrary finite domains".
The rounds are in csrc/datakit/permutation.cpp, their inverse is here: few ask for it.
"""

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from datakit.store.shard import Int64s
from datakit.stream.native import stream_library

NUM_ROUNDS = 8


class Permutation:
    """One order of 0..size-1, chosen by `key`; `permutation(indices)` maps positions to elements."""

    def __init__(self, size: int, key: bytes) -> None:
        """`size` is from 1 to 2^62."""
        assert 1 <= size <= 1 << 62, "a permutation of at least one element"
        self.size = size
        self._keys = array("Q", (xxhash.xxh3_64_intdigest(key, seed=i) for i in range(NUM_ROUNDS)))
        self._keys_address, _ = self._keys.buffer_info()

    def __call__(self, indices: npt.ArrayLike) -> Int64s:
        """Return the elements at these positions, each from 0 to size-1."""
        positions: list[int] = np.array(indices, np.int64, ndmin=1).tolist()
        return np.array(elements_at([(self, position) for position in positions]), np.int64)

    def positions(self, elements: npt.ArrayLike) -> Int64s:
        """Return where these elements are, the inverse of a call: the same walk, each network pass undone."""
        found = np.array(elements, np.uint64, ndmin=1)
        outside = np.ones(len(found), bool)
        while outside.any():
            found[outside] = self._decrypt(found[outside])
            outside = found >= self.size
        return found.astype(np.int64)

    def _decrypt(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Undo one pass of the network in permutation.cpp: even rounds changed its left half, odd ones its right."""
        num_bits = max(2, (self.size - 1).bit_length())
        widths = num_bits // 2, num_bits - num_bits // 2
        masks = [np.uint64((1 << width) - 1) for width in widths]
        left, right = values >> np.uint64(widths[1]), values & masks[1]
        for number in reversed(range(NUM_ROUNDS)):
            left, right = right ^ (_mix(left ^ np.uint64(self._keys[number])) & masks[number % 2]), left
        return left << np.uint64(widths[1]) | right


def elements_at(places: Sequence[tuple[Permutation, int]]) -> list[int]:
    """Return the element at each of these positions of permutations."""
    rows: list[int] = []
    for order, position in places:
        assert 0 <= position < order.size, "positions are below the size"
        rows += (order._keys_address, order.size, position)
    table, elements = array("q", rows), array("q", bytes(8 * len(places)))
    stream_library().dk_permute(table.buffer_info()[0], len(places), NUM_ROUNDS, elements.buffer_info()[0])
    return elements.tolist()


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return what `mix` in permutation.cpp returns, of many words."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
