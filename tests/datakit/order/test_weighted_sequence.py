"""Weighted sequence: exact counts, and weights kept at every prefix."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datakit.order.weighted_sequence import CIRCLE, WeightedSequence

WEIGHTS = st.lists(st.floats(0, 100), min_size=1, max_size=12).filter(lambda weights: sum(weights) > 1e-3)
THETAS = st.integers(0, CIRCLE - 1)


STEP = 2850178704830799621


def floor_sum(n: int, m: int, a: int, b: int) -> int:
    """sum((a * i + b) // m for i in range(n)), by Euclid's algorithm in whole numbers of any size."""
    total = 0
    while n > 0:
        total += (n - 1) * n // 2 * (a // m) + n * (b // m)
        a, b = a % m, b % m
        n, b, m, a = *divmod(a * n + b, m), a, m
    return total


@given(n=st.integers(0, 60), m=st.integers(1, 50), a=st.integers(0, 200), b=st.integers(0, 200))
def test_the_reference_is_the_sum(n: int, m: int, a: int, b: int) -> None:
    assert floor_sum(n, m, a, b) == sum((a * i + b) // m for i in range(n))


@given(weights=WEIGHTS, theta=THETAS)
def test_counts_are_those_of_the_stream_and_keep_to_the_weights(weights: list[float], theta: int) -> None:
    sequence = WeightedSequence(weights, theta)
    sources, numbers = sequence.locate(np.arange(2000))
    counts = np.cumsum(sources[:, None] == np.arange(len(weights)), axis=0)
    assert numbers.tolist() == (counts[np.arange(2000), sources] - 1).tolist()
    for n in (0, 1, 7, 1999):
        assert sequence.counts(n + 1).tolist() == counts[n].tolist()
    shares = np.array(weights) / sum(weights)
    assert np.abs(counts - np.arange(1, 2001)[:, None] * shares).max() <= 4
    assert not counts[-1][np.array(weights) == 0].any()


@given(weights=WEIGHTS, theta=THETAS, sample=st.integers(0, 2**62 - 1))
def test_access_is_random_and_exact(weights: list[float], theta: int, sample: int) -> None:
    sequence = WeightedSequence(weights, theta)
    [source], [number] = (column.tolist() for column in sequence.locate(np.array([sample])))
    edges = [0, *np.cumsum(sequence.arcs).tolist()]
    assert edges[source] <= (STEP * sample + theta) % CIRCLE < edges[source + 1]
    beyond = [floor_sum(sample, CIRCLE, STEP, theta + CIRCLE - edge) for edge in edges]
    assert number == beyond[source] - beyond[source + 1]
    assert sequence.counts(sample).tolist() == [first - second for first, second in pairwise(beyond)]


@given(
    weights=WEIGHTS,
    theta=THETAS,
    runs=st.lists(st.tuples(st.integers(0, 2**62 - 30), st.integers(1, 30)), min_size=1, max_size=5),
)
def test_samples_of_one_call_are_those_of_single_ones(
    weights: list[float], theta: int, runs: list[tuple[int, int]]
) -> None:
    sequence = WeightedSequence(weights, theta)
    samples = [first + place for first, count in runs for place in range(count)]
    alone = [sequence.locate(np.array([sample])) for sample in samples]
    for column, found in enumerate(sequence.locate(np.array(samples))):
        assert found.tolist() == [int(each[column][0]) for each in alone]


@pytest.mark.parametrize("scale", [1e-3, 1, 1e6])
def test_weights_need_not_sum_to_one(scale: float) -> None:
    plain, scaled = WeightedSequence([0.5, 0.3, 0.2]), WeightedSequence([0.5 * scale, 0.3 * scale, 0.2 * scale])
    assert (plain.locate(np.arange(1000))[0] == scaled.locate(np.arange(1000))[0]).all()


@given(weights=WEIGHTS, theta=THETAS, samples=st.lists(st.integers(0, 2**62 - 1) | st.integers(0, 50), min_size=1))
def test_a_sources_sample_is_found_by_its_number(weights: list[float], theta: int, samples: list[int]) -> None:
    sequence = WeightedSequence(weights, theta)
    sources, numbers = (column.tolist() for column in sequence.locate(np.array(samples)))
    assert [sequence.sample_of(source, number) for source, number in zip(sources, numbers)] == samples


def test_a_rare_sources_samples_are_found_by_their_numbers() -> None:
    sequence = WeightedSequence([1.0, 1e-9], 5)
    found = [sequence.sample_of(1, number) for number in (0, 1, 2, 10**8)]
    sources, numbers = sequence.locate(np.array(found))
    assert sources.tolist() == [1, 1, 1, 1]
    assert numbers.tolist() == [0, 1, 2, 10**8]
