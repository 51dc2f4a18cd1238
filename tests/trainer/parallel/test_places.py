"""Places: shares, rows and boxes of runs are their tokens in order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.parallel.places import boxes, rows_of, share_of

RUNS = st.lists(st.integers(0, 40).flatmap(lambda n: st.integers(n + 1, 50).map(lambda m: range(n, m))), max_size=4)


@given(runs=RUNS, length=st.integers(1, 9))
def test_boxes_are_the_tokens_in_order_and_few(runs: list[range], length: int) -> None:
    found = list(boxes(tuple(runs), length))
    places = [row * length + position + at for row, position, size in found for at in range(size)]
    assert places == [place for run in runs for place in run]
    assert len(found) <= 3 * len(runs)
    assert all(size % length == 0 or position + size <= length for _, position, size in found)


@given(runs=RUNS, num_shares=st.integers(1, 6))
def test_shares_are_the_places_in_order(runs: list[range], num_shares: int) -> None:
    places = [place for run in runs for place in run]
    size = len(places) // num_shares
    shares = [share_of(tuple(runs), index, num_shares) for index in range(num_shares)]
    assert [[place for run in share for place in run] for share in shares] == [
        places[index * size : (index + 1) * size] for index in range(num_shares)
    ]
    assert all(len(run) for share in shares for run in share)


def test_places_that_no_run_has_are_refused() -> None:
    with pytest.raises(AssertionError, match=r"range\(3, 5\) is not within one of"):
        rows_of(range(3, 5), (range(4), range(4, 8)))
