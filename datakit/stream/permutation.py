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
from datakit.stream.native import address_of, stream_library

NUM_ROUNDS = 8  # DK_NUM_ROUNDS of csrc/datakit/datakit.h
_MAX_NAME_BYTES = 200


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
    stream_library().dk_permute(table.buffer_info()[0], len(places), elements.buffer_info()[0])
    return elements.tolist()


class Epochs:
    """The permutations of several sources' elements, one an epoch: epoch 7 of a source named (b"a/", b"/b") has the key
    b"a/7/b". Safe to use from several threads.
    """

    def __init__(self, names: Sequence[tuple[bytes, bytes]], sizes: Sequence[int]) -> None:
        """Take what is before and after an epoch's number in its key, 200 bytes at most, and the elements of each."""
        assert all(len(before) + len(after) <= _MAX_NAME_BYTES for before, after in names), "keys are short"
        self._names = [(array("b", before + b" "), array("b", after + b" ")) for before, after in names]  # of any size
        rows = [
            (before.buffer_info()[0], len(before) - 1, after.buffer_info()[0], len(after) - 1, max(size, 1))
            for (before, after), size in zip(self._names, sizes)
        ]
        self._native = np.array(rows, np.int64)  # a dk_epochs each

    def elements(self, sources: Int64s, numbers: Int64s) -> Int64s:
        """Return of each of some sources the element that is its `numbers[i]`-th, epoch after epoch."""
        elements = np.empty(len(sources), np.int64)
        stream_library().dk_elements(
            address_of(self._native), address_of(sources), address_of(numbers), len(sources), address_of(elements)
        )
        return elements


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return what `mix` in permutation.cpp returns, of many words."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
