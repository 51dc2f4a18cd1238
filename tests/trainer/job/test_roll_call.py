"""Ranks of one start find each other in a store that has what an earlier start left, in whatever order they come."""

import itertools
from collections.abc import Sequence

import pytest
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from trainer.job.roll_call import RollCall

SIZE = 3


def roll(store: Store, order: Sequence[int]) -> dict[int, str]:
    """Let the ranks come in an order, each looking once before the next comes, then until all have a start."""
    calls: dict[int, RollCall] = {}
    starts: dict[int, str] = {}
    for _ in range(4):
        for rank in order:
            if rank not in calls:
                calls[rank] = RollCall(store, rank, SIZE)
            if (start := calls[rank].start()) is not None:
                starts[rank] = start
            calls[rank].answer()
    assert all(starts[rank] == call.start() for rank, call in calls.items()), "a start is never another one later"
    return starts


@pytest.mark.parametrize("order", list(itertools.permutations(range(SIZE))))
def test_ranks_of_a_start_agree_on_it_beside_names_of_before(order: Sequence[int]) -> None:
    store = HashStore()
    names = set[str]()
    for _ in range(3):
        starts = roll(store, order)
        assert sorted(starts) == [0, 1, 2]
        assert len(set(starts.values())) == 1
        names.update(starts.values())
    assert len(names) == 3, "each start has a name of its own"


def test_nobody_takes_a_rank_0_of_before() -> None:
    store = HashStore()
    roll(store, (0, 1, 2))
    later = RollCall(store, 1, SIZE)
    assert later.start() is None
    first = RollCall(store, 0, SIZE)
    first.answer()
    assert later.start() == first.name
