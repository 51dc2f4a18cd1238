"""Schedules are data: simulated over any number of stages they never deadlock and keep 1F1B's memory bound."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from threefold.errors import UserError
from trainer.schedule import Action, gpipe, one_f_one_b

Schedule = Callable[[int, int, int], list[Action]]


def simulate(schedules: list[list[Action]]) -> list[int]:
    """Run all stages against each other; return each stage's peak of live micro-batches.

    At most as many sends as there are stages are under way between two neighbours in one direction.
    """
    num_stages = len(schedules)
    done: set[tuple[int, Action]] = set()
    places, live, peaks = ([0] * num_stages for _ in range(3))
    counts = {"F": [0] * num_stages, "B": [0] * num_stages}
    while any(places[s] < len(schedules[s]) for s in range(num_stages)):
        moved = False
        for s in range(num_stages):
            if places[s] == len(schedules[s]):
                continue
            action = schedules[s][places[s]]
            needs_from, sends_to = (s - 1, s + 1) if action.kind == "F" else (s + 1, s - 1)
            if 0 <= needs_from < num_stages and (needs_from, action) not in done:
                continue
            count = counts[action.kind]
            if 0 <= sends_to < num_stages and count[s] - count[sends_to] == num_stages:
                continue
            count[s] += 1
            assert action.kind == "F" or (s, Action("F", action.microbatch)) in done, "backward before forward"
            done.add((s, action))
            places[s] += 1
            live[s] += 1 if action.kind == "F" else -1
            peaks[s] = max(peaks[s], live[s])
            moved = True
        assert moved, f"deadlock at {places}"
    return peaks


@given(
    num_stages=st.integers(1, 12), num_microbatches=st.integers(1, 40), schedule=st.sampled_from([gpipe, one_f_one_b])
)
def test_no_deadlock_each_pass_once(num_stages: int, num_microbatches: int, schedule: Schedule) -> None:
    schedules = [schedule(stage, num_stages, num_microbatches) for stage in range(num_stages)]
    for actions in schedules:
        assert sorted(actions) == sorted(Action(kind, m) for kind in "FB" for m in range(num_microbatches))
    peaks = simulate(schedules)
    if schedule is one_f_one_b:
        assert peaks == [min(num_stages - stage, num_microbatches) for stage in range(num_stages)]
    else:
        assert peaks == [num_microbatches] * num_stages


def test_one_f_one_b_by_hand() -> None:
    names = [f"{kind}{m}" for kind, m in one_f_one_b(stage=1, num_stages=4, num_microbatches=4)]
    assert names == ["F0", "F1", "F2", "B0", "F3", "B1", "B2", "B3"]


@pytest.mark.parametrize("arguments", [(2, 2, 4), (-1, 2, 4), (0, 2, 0)])
def test_a_schedule_that_cannot_be_is_refused(arguments: tuple[int, int, int]) -> None:
    with pytest.raises(UserError, match="no schedule"):
        one_f_one_b(*arguments)
