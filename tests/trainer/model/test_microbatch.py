"""MicroBatch: what belongs to some of its tokens goes by their places."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.model.microbatch import DropoutKey, MicroBatch
from trainer.parallel.places import Runs, share_of

NOTHING = torch.empty(0)


def micro_batch(length: int, runs: Runs, own_runs: Runs | None = None) -> MicroBatch:
    return MicroBatch(NOTHING, NOTHING, NOTHING, NOTHING, length, runs, DropoutKey(0.4, 3, 5), own_runs=own_runs)


@st.composite
def runs_of(draw: st.DrawFn, size: int) -> Runs:
    """Some of so many places, cut into runs in any order."""
    bounds = sorted(draw(st.sets(st.integers(0, size), min_size=2)))
    return tuple(draw(st.permutations([range(*ends) for ends in pairwise(bounds)])))


@given(num_rows=st.integers(1, 4), length=st.integers(1, 6), data=st.data())
def test_any_runs_of_tokens_are_dropped_as_in_the_whole(num_rows: int, length: int, data: st.DataObject) -> None:
    whole = range(7 * length, (7 + num_rows) * length)
    runs = tuple(whole[run.start : run.stop] for run in data.draw(runs_of(len(whole))))
    x = torch.ones(len(whole), 5, dtype=torch.float64)
    expected = micro_batch(length, (whole,)).drop(x, layer=2, site=1)
    rows = torch.cat([torch.arange(run.start, run.stop) for run in runs]) - whole.start
    assert torch.equal(micro_batch(length, runs).drop(x[rows], layer=2, site=1), expected[rows])


@given(runs=runs_of(40), num_shares=st.integers(1, 5), length=st.integers(1, 9))
def test_shares_of_the_tokens_are_dropped_and_placed_as_they_are_together(
    runs: Runs, num_shares: int, length: int
) -> None:
    places = torch.cat([torch.arange(run.start, run.stop) for run in runs])
    size = len(places) // num_shares
    x = torch.ones(len(places), 3, dtype=torch.float64)
    together = micro_batch(length, runs).drop(x, layer=0, site=0)
    for index in range(num_shares if size else 0):
        own = micro_batch(length, runs, share_of(runs, index, num_shares))
        rows = slice(index * size, (index + 1) * size)
        assert torch.equal(own.own(places), places[rows])
        assert torch.equal(own.drop(x[rows], layer=0, site=0), together[rows])
