"""A rank is slow if its own work takes longer than that of the others, in most comparisons."""

import pytest

from trainer.observe.stragglers import Stragglers, slower


def test_a_rank_is_compared_with_the_median_of_the_others() -> None:
    assert slower([1.0, 1.0, 1.3, 1.1], 0.2) == {2: pytest.approx(0.3)}
    assert slower([1.0, 1.5], 0.2) == {1: pytest.approx(0.5)}
    assert slower([1.0, 1.05, 0.95, 1.0], 0.1) == {}
    assert slower([2.0], 0.1) == {}
    assert slower([0.0, 0.0], 0.1) == {}


def test_ranks_are_compared_after_so_many_steps_by_the_median_of_each() -> None:
    stragglers = Stragglers(0.1, 3)
    assert [stragglers.add(own_s) for own_s in (80.0, 1.0, 90.0, 1.2)] == [False, False, False, True]  # not the first
    assert stragglers.take() == 1.2
    assert [stragglers.add(1.0) for _ in range(2)] == [False, False]


def test_who_is_slow_in_most_comparisons_is_in_the_summary() -> None:
    stragglers = Stragglers(0.1, 5)
    assert stragglers.summary == ""
    for own_s in ([1.0, 1.0, 1.5], [1.0, 1.0, 1.5], [1.3, 1.0, 1.0]):
        stragglers.compare(own_s)
    assert stragglers.summary == "rank 2 was slower than the others by 50%, in 2 of 3 comparisons of 5 steps"


def test_without_a_share_nothing_is_compared() -> None:
    stragglers = Stragglers(0.0, 1)
    assert not stragglers.add(1.0)
