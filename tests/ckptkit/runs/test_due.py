"""Which steps a slower tier is to have: the first of each interval, whatever was saved."""

from hypothesis import given
from hypothesis import strategies as st

from ckptkit.runs.due import is_due, owed


@given(every=st.integers(1, 20), saved=st.sets(st.integers(1, 200), min_size=1))
def test_of_the_steps_that_are_saved_the_first_of_each_interval_is_due(every: int, saved: set[int]) -> None:
    after, due = 0, []
    for step in sorted(saved):
        if is_due(every, step, after):
            due.append(step)
        after = step
    first = {step // every: step for step in sorted(saved, reverse=True) if step >= every}
    assert due == sorted(first.values())
    assert all(is_due(0, step, None) for step in saved)
    assert [step for step in saved if is_due(every, step, None)] == [step for step in saved if step % every == 0]


def test_a_tier_is_owed_the_first_step_of_each_interval() -> None:
    assert owed(6, [5, 7, 8, 12], 5) == {7, 12}
    assert owed(6, [5, 7, 8, 12], 7) == {12}
    assert owed(6, [0, 6, 7], -1) == {0, 6}
    assert owed(0, [3, 4], 3) == {4}
    assert owed(100, [6, 7], -1) == set()
