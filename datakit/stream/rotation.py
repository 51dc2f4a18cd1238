"""Which of several weighted sources sample n comes from, and how many came from it before: arithmetic, no index.

Sample i falls at x_i = (A*i + theta) mod 2^62, A being 2^62 over the golden ratio; source d owns an arc of that circle
as long as its weight. Counting the earlier samples on an arc is a floor sum, O(log n). The sequence has low discrepancy
(Weyl 1916; Niederreiter 1992): every prefix of n samples holds weight * n of a source, up to a few.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from datakit.shard import Int64s

CIRCLE = 1 << 62
STEP = 2850178704830799621  # round((sqrt(5) - 1) / 2 * 2^62), made odd


class Rotation:
    """The stream of one fixed list of weights; a source of weight 0 never comes."""

    def __init__(self, weights: Sequence[float], theta: int = 0) -> None:
        """`weights` need not sum to 1; `theta`, below 2^62, is where sample 0 falls."""
        assert 0 <= theta < CIRCLE, "theta is a point of the circle"
        ends = np.cumsum(np.asarray(weights, np.float64))
        edges = [0] + [min(CIRCLE, round(float(end) / float(ends[-1]) * CIRCLE)) for end in ends]
        last = max(source for source, weight in enumerate(weights) if weight > 0)
        edges[last + 1 :] = [CIRCLE] * (len(edges) - last - 1)
        self._edges, self._theta = edges, theta
        self._right_edges = np.array(edges[1:], np.uint64)

    @property
    def arcs(self) -> list[int]:
        """The length of each source's arc: all that the stream depends on, besides theta."""
        return [end - start for start, end in pairwise(self._edges)]

    def sources(self, start: int, stop: int) -> Int64s:
        """The source of each sample in [start, stop)."""
        points = np.arange(start, stop, dtype=np.uint64) * np.uint64(STEP) + np.uint64(self._theta)
        points &= np.uint64(CIRCLE - 1)
        return np.searchsorted(self._right_edges, points, side="right").astype(np.int64)

    def counts(self, num_samples: int) -> Int64s:
        """How many of the first samples come from each source."""
        below = [self._below(edge, num_samples) for edge in self._edges]
        return np.array([end - start for start, end in pairwise(below)], np.int64)

    def _below(self, edge: int, num_samples: int) -> int:
        """How many of the first samples fall on [0, edge)."""
        whole = floor_sum(num_samples, CIRCLE, STEP, self._theta + CIRCLE)
        return whole - floor_sum(num_samples, CIRCLE, STEP, self._theta + CIRCLE - edge)


def floor_sum(n: int, m: int, a: int, b: int) -> int:
    """sum(floor((a*i + b) / m) for i in range(n)), exactly, in O(log) steps of Euclid's algorithm."""
    total = 0
    while n > 0:
        total += (n - 1) * n // 2 * (a // m) + n * (b // m)
        a, b = a % m, b % m
        last = a * n + b
        n, b, m, a = last // m, last % m, a, m  # the last round leaves n = 0
    return total
