"""A keyed permutation of 0..n-1 with random access: no table, no start-up, no memory.

A Feistel network over the smallest power of two that holds n, walked along its cycle until it lands below n (less than
two rounds of it on average). Luby and Rackoff 1988; Black and Rogaway 2002, "Ciphers with arbitrary finite domains".
"""

import numpy as np
import numpy.typing as npt
import xxhash

from datakit.shard import Int64s

NUM_ROUNDS = 8
_Words = npt.NDArray[np.uint64]


class Permutation:
    """One order of 0..size-1, chosen by `key`; `permutation(indices)` maps positions to elements, vectorised."""

    def __init__(self, size: int, key: bytes) -> None:
        """`size` is from 1 to 2^62."""
        assert 1 <= size <= 1 << 62, "a permutation of at least one element"
        self.size = size
        num_bits = max(2, (size - 1).bit_length())
        self._bits = num_bits // 2, num_bits - num_bits // 2
        self._keys = [np.uint64(xxhash.xxh3_64_intdigest(key, seed=i)) for i in range(NUM_ROUNDS)]

    def __call__(self, indices: npt.ArrayLike) -> Int64s:
        """The elements at these positions, each from 0 to size-1."""
        values = np.array(indices, np.uint64, ndmin=1)
        assert not len(values) or values.max() < self.size, "positions are below the size"
        values = self._encrypt(values)
        outside = np.flatnonzero(values >= self.size)
        while len(outside):
            values[outside] = self._encrypt(values[outside])
            outside = outside[values[outside] >= self.size]
        return values.astype(np.int64)

    def _encrypt(self, values: _Words) -> _Words:
        """One pass of the network: the halves swap places, and with them their widths, every round."""
        left_bits, right_bits = self._bits
        left, right = values >> np.uint64(right_bits), values & _mask(right_bits)
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & _mask(left_bits))
            left_bits, right_bits = right_bits, left_bits
        return left << np.uint64(right_bits) | right


def _mask(num_bits: int) -> np.uint64:
    return np.uint64((1 << num_bits) - 1)


def _mix(words: _Words) -> _Words:
    """The finalizer of SplitMix64 (Steele et al. 2014): every input bit moves every output bit."""
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return words ^ words >> np.uint64(31)
