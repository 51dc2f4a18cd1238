"""Which of several weighted sources sample n comes from, and how many came from it before: arithmetic, no index.

Sample i falls at x_i = (A*i + theta) mod 2^62, A being 2^62 over the golden ratio; source d owns an arc of that circle
as long as its weight. Counting the earlier samples on an arc takes two floor sums, sum(floor((A*i + b) / 2^62)), O(log
n) each (csrc/datakit/rotation.cpp). The sequence has low discrepancy (Weyl 1916; Niederreiter 1992): any n samples in a
row hold weight * n of a source, up to `max_deviation(n)`. Denjoy and Koksma: among q samples, q a denominator of the
convergents of A / 2^62, the count of an arc is at most 2 off, and n is a sum of few such denominators.
"""

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from functools import cache

import numpy as np

from datakit.format.native import address_of, library
from datakit.format.shard import Int64s

CIRCLE = 1 << 62
STEP = 2850178704830799621  # A, as in rotation.cpp
_DISCREPANCY = 4  # samples of a source that most prefixes have more or less than its weight says


@cache
def denominators() -> tuple[int, ...]:
    """Return the denominators of the convergents of A / 2^62, rising: 1, 2, 3, 5, 8, ... and later faster."""
    found, modulus, multiplier = [0, 1], STEP, CIRCLE
    while modulus:
        quotient, rest = divmod(multiplier, modulus)
        found.append(quotient * found[-1] + found[-2])
        multiplier, modulus = modulus, rest
    return tuple(found[1:])


def max_deviation(num_samples: int) -> int:
    """Return a bound on |count - weight * n| of any source over any n samples in a row: 4 for 1,000, 10 for 10^6."""
    terms = 0
    for denominator in reversed(denominators()):
        taken, num_samples = divmod(num_samples, denominator)
        terms += taken
    return 2 * terms


class WeightedSequence:
    """The stream of one fixed list of weights; a source of weight 0 never comes."""

    def __init__(self, weights: Sequence[float], theta: int = 0) -> None:
        """`weights` need not sum to 1; `theta`, below 2^62, is where sample 0 falls."""
        assert 0 <= theta < CIRCLE, "theta is a point of the circle"
        ends = np.cumsum(np.asarray(weights, np.float64))
        edges = [0] + [min(CIRCLE, round(float(end) / float(ends[-1]) * CIRCLE)) for end in ends]
        last = max(source for source, weight in enumerate(weights) if weight > 0)
        edges[last + 1 :] = [CIRCLE] * (len(edges) - last - 1)
        self._edges, self._theta, self._num_sources = np.array(edges, np.int64), theta, len(edges) - 1
        self._edges_address = self._edges.ctypes.data

    @property
    def arcs(self) -> list[int]:
        """The length of each source's arc: all that the stream depends on, besides theta."""
        lengths: list[int] = np.diff(self._edges).tolist()
        return lengths

    def locate(self, samples: Int64s) -> tuple[Int64s, Int64s]:
        """For each sample, 0 to 2^62 - 1, its source and how many of the earlier samples are of that source."""
        located = np.empty((2, len(samples)), np.int64)
        if len(samples):
            wanted, address = np.array(samples, np.int64), address_of(located)  # of its own, so without gaps
            code = library().dk_rotation_locate(
                self._theta, self._edges_address, self._num_sources, address_of(wanted), len(wanted), address,
                address + 8 * len(wanted),
            )  # fmt: skip
            if code:
                raise MemoryError(f"no memory to locate samples of {self._num_sources} sources")
        return located[0], located[1]

    def sample_of(self, source: int, number: int) -> int:
        """Return the sample that is a source's `number`-th, from 0: what `locate` inverts, by search among its counts.

        The source has so many samples below 2^62.
        """
        address, below = self._edges_address + 8 * source, array("q", (0, 0))

        def count(num_samples: int) -> int:
            """Return how many of the first samples come from the source."""
            library().dk_rotation_counts(self._theta, address, 2, num_samples, below.buffer_info()[0])
            return below[1] - below[0]

        assert 0 <= number < count(CIRCLE), "the source has this sample"
        samples_a_number = CIRCLE / self.arcs[source]
        width = int(_DISCREPANCY * samples_a_number) + 1
        near = min(int(number * samples_a_number), CIRCLE)
        low, high = max(near - width, 0), min(near + width, CIRCLE)
        while count(low) > number:
            low, width = max(low - width, 0), 2 * width
        while count(high) <= number:
            high, width = min(high + width, CIRCLE), 2 * width
        return low + bisect_right(range(low, high), number, key=count) - 1

    def counts(self, num_samples: int) -> Int64s:
        """Return how many of the first samples come from each source."""
        below = np.empty(len(self._edges), np.int64)
        library().dk_rotation_counts(self._theta, self._edges_address, len(below), num_samples, address_of(below))
        return below[1:] - below[:-1]
