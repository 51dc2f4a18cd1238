"""The rotation: exact counts, and weights kept at every prefix."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datakit.stream.rotation import CIRCLE, Rotation, floor_sum

WEIGHTS = st.lists(st.floats(0, 100), min_size=1, max_size=12).filter(lambda weights: sum(weights) > 1e-3)
THETAS = st.integers(0, CIRCLE - 1)


@given(n=st.integers(0, 60), m=st.integers(1, 50), a=st.integers(0, 200), b=st.integers(0, 200))
def test_floor_sum(n: int, m: int, a: int, b: int) -> None:
    assert floor_sum(n, m, a, b) == sum((a * i + b) // m for i in range(n))


@given(weights=WEIGHTS, theta=THETAS)
def test_counts_are_those_of_the_stream_and_keep_to_the_weights(weights: list[float], theta: int) -> None:
    rotation = Rotation(weights, theta)
    sources = rotation.sources(0, 2000)
    counts = np.cumsum(sources[:, None] == np.arange(len(weights)), axis=0)
    for n in (0, 1, 7, 1999):
        assert rotation.counts(n + 1).tolist() == counts[n].tolist()
    shares = np.array(weights) / sum(weights)
    assert np.abs(counts - np.arange(1, 2001)[:, None] * shares).max() <= 4
    assert not counts[-1][np.array(weights) == 0].any()


@given(weights=WEIGHTS, theta=THETAS, start=st.integers(0, 2**50))
def test_access_is_random(weights: list[float], theta: int, start: int) -> None:
    rotation = Rotation(weights, theta)
    sources = rotation.sources(start, start + 50)
    gained = rotation.counts(start + 50) - rotation.counts(start)
    assert gained.tolist() == np.bincount(sources, minlength=len(weights)).tolist()
    assert rotation.counts(start).sum() == start


@pytest.mark.parametrize("scale", [1e-3, 1, 1e6])
def test_weights_need_not_sum_to_one(scale: float) -> None:
    plain, scaled = Rotation([0.5, 0.3, 0.2]), Rotation([0.5 * scale, 0.3 * scale, 0.2 * scale])
    assert (plain.sources(0, 1000) == scaled.sources(0, 1000)).all()
