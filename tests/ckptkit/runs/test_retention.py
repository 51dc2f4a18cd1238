"""The policy, without a storage: what each rule keeps, and what no rule can delete; which steps a slower tier gets."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.runs.record import StepRecord
from ckptkit.runs.retention import (
    HOUR_S,
    Retention,
    beyond_limit,
    expired,
    first_of_multiples,
    is_due,
    newest_of_hours,
    owed,
    ranked,
    reasons_to_keep,
)
from threefold.errors import UserError

RULES = ("keep_last", "keep_every", "keep_best", "keep_hourly")


def good(step: int, loss: float | None = None, hour: float = 1.0, pin: str | None = None) -> StepRecord:
    metadata = {} if loss is None else {"val_loss": loss}
    return StepRecord(step, saved_at=hour * HOUR_S, pin=pin, attempt="a", metadata=metadata)


@st.composite
def records(draw: st.DrawFn) -> list[StepRecord]:
    """Any run: good, incomplete and unreadable steps, in any order, saved at any hour."""
    steps = draw(st.lists(st.integers(0, 60), unique=True, max_size=25))
    return [
        StepRecord(
            step,
            saved_at=draw(st.sampled_from([0.0, *(hour * HOUR_S / 2 for hour in range(1, 20))])),
            pin=draw(st.sampled_from([None, None, None, "", "note"])),
            problem=draw(st.sampled_from(["", "", "", "a file is missing"])),
            attempt=draw(st.sampled_from(["a", "a", "a", ""])),
            metadata=draw(st.sampled_from([{}, {"val_loss": None}, *({"val_loss": n / 2} for n in range(6))])),
        )
        for step in steps
    ]


def policies() -> st.SearchStrategy[Retention]:
    small = st.integers(0, 8)
    return st.builds(Retention, small, small, small, small, mode=st.sampled_from(["min", "max"]))


def kept_steps(records: list[StepRecord], policy: Retention) -> set[int]:
    return {record.step for record in records} - set(expired(records, policy))


@given(records(), policies())
def test_the_newest_good_step_and_pinned_and_unreadable_ones_stay(steps: list[StepRecord], policy: Retention) -> None:
    stay = kept_steps(steps, policy)
    assert {record.step for record in steps if record.pin is not None or not record.attempt} <= stay
    good_steps = [record.step for record in steps if record.is_good]
    if good_steps:
        assert {record.step for record in steps if record.step >= max(good_steps)} <= stay
    else:
        assert len(stay) == len(steps)


@given(records(), policies())
def test_rules_compose_by_union(steps: list[StepRecord], policy: Retention) -> None:
    rules = [Retention(**{name: getattr(policy, name)}, mode=policy.mode) for name in RULES]
    each = [kept_steps(steps, rule) for rule in rules if rule.has_rules]
    assert kept_steps(steps, policy) == (set().union(*each) if each else {record.step for record in steps})


@given(records(), policies())
def test_a_second_prune_finds_nothing(steps: list[StepRecord], policy: Retention) -> None:
    stay = kept_steps(steps, policy)
    assert expired([record for record in steps if record.step in stay], policy) == []


@given(records(), policies(), st.sampled_from(["keep_last", "keep_best", "keep_hourly"]), st.integers(1, 5))
def test_a_larger_number_keeps_no_less(steps: list[StepRecord], policy: Retention, rule: str, more: int) -> None:
    if policy.has_rules:
        larger = dataclasses.replace(policy, **{rule: getattr(policy, rule) + more})
        assert kept_steps(steps, policy) <= kept_steps(steps, larger)


@given(records(), policies(), st.randoms())
def test_the_order_of_records_is_of_no_account(steps: list[StepRecord], policy: Retention, random: object) -> None:
    shuffled = steps.copy()
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert expired(shuffled, policy) == expired(steps, policy)
    assert expired(steps, policy) == sorted(step for step, why in reasons_to_keep(steps, policy).items() if not why)


def test_without_a_rule_everything_stays() -> None:
    assert expired([good(step) for step in range(9)], Retention()) == []


def test_the_last_count_good_steps_only() -> None:
    found = [good(1), good(2), StepRecord(3, attempt="a", problem="a file is missing"), good(4)]
    assert kept_steps(found, Retention(keep_last=1)) == {4}
    assert kept_steps(found, Retention(keep_last=2)) == {2, 3, 4}
    found.insert(0, StepRecord(0, attempt="a", problem="a file is missing"))
    assert kept_steps(found, Retention(keep_last=3)) == {1, 2, 3, 4}
    assert kept_steps(found, Retention(keep_last=4)) == {0, 1, 2, 3, 4}


def test_a_damaged_step_newer_than_the_newest_good_one_stays() -> None:
    found = [good(1), good(2), StepRecord(3, attempt="a", problem="a file is missing")]
    assert kept_steps(found, Retention(keep_last=1)) == {2, 3}


def test_every_takes_the_first_step_at_or_after_each_multiple() -> None:
    every = Retention(keep_every=10)
    assert kept_steps([good(step) for step in (0, 5, 10, 14, 20, 21)], every) == {0, 10, 20, 21}
    assert kept_steps([good(step) for step in (3, 9, 11, 19, 20, 38, 39, 45)], every) == {11, 20, 38, 45}
    assert kept_steps(
        [StepRecord(11, attempt="a", problem="a file is missing"), good(13), good(14), good(25)], every
    ) == {
        13,
        25,
    }


@given(st.sets(st.integers(0, 200), min_size=1), st.integers(1, 40), st.data())
def test_a_holder_of_a_multiple_stays_whatever_is_saved_or_pruned_later(
    steps: set[int], every: int, data: st.DataObject
) -> None:
    """After each save only what is kept is there, as after every prune, and the end is that of one prune of all."""
    policy, stored = Retention(keep_every=every), list[StepRecord]()
    for step in sorted(steps):
        stored.append(good(step))
        if data.draw(st.booleans()):
            stored = [record for record in stored if record.step in kept_steps(stored, policy)]
    held = {record.step for record in first_of_multiples([good(step) for step in steps], every)}
    assert kept_steps(stored, policy) == held | {max(steps)} == kept_steps([good(step) for step in steps], policy)
    assert len({step // every for step in held}) == len(held)


def test_the_best_of_equal_ones_is_the_newest() -> None:
    found = [good(1, 2.0), good(2, 1.0), good(3, 1.0), good(4, 3.0), good(5), good(6, None)]
    assert kept_steps(found, Retention(keep_best=1)) == {3, 6}
    assert kept_steps(found, Retention(keep_best=3)) == {1, 2, 3, 6}
    assert kept_steps(found, Retention(keep_best=1, mode="max")) == {4, 6}
    assert kept_steps(found, Retention(keep_best=1, metric="other")) == {6}
    assert [record.step for record in ranked(found, "val_loss", "max")] == [4, 1, 3, 2]


def test_hourly_keeps_the_newest_step_of_each_hour_that_has_one() -> None:
    records = [
        good(1, hour=1.0),
        good(2, hour=1.5),
        good(3, hour=4.2),
        good(4, hour=9.9),
        good(5, hour=9.1),
        good(6, hour=0),
    ]
    assert [record.step for record in newest_of_hours(records)] == [5, 3, 2]
    assert kept_steps(records, Retention(keep_hourly=2)) == {3, 5, 6}
    assert kept_steps(records, Retention(keep_hourly=24)) == {2, 3, 5, 6}


def test_reasons_are_told() -> None:
    found = [good(1), good(10, 1.0, pin="paper"), good(11), StepRecord(12, problem="damaged")]
    assert reasons_to_keep(found, Retention(keep_last=1, keep_every=10, keep_best=2)) == {
        1: [],
        10: ["pinned", "every 10", "best 2 by val_loss"],
        11: ["last 1", "newest good step"],
        12: ["its root cannot be read", "newer than the newest good step"],
    }


def test_what_cannot_be_asked() -> None:
    with pytest.raises(UserError, match="keep_best -1 is not a whole number from 0"):
        Retention(keep_best=-1)
    with pytest.raises(UserError, match="neither min nor max"):
        Retention(mode="least")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("limit", "best", "going"),
    [
        (4, 10, []), (3, None, [5]), (3, 10, [5]), (2, 10, [5, 15]), (1, 10, [5, 15]), (1, None, [5, 10, 15]),
        (1, 20, [5, 10, 15]), (2, 7, [5, 10]),
    ],
)  # fmt: skip
def test_beyond_a_limit_the_oldest_go_but_the_best(limit: int, best: int | None, going: list[int]) -> None:
    assert beyond_limit([5, 10, 15, 20], limit, best) == going
    assert beyond_limit([], limit, best) == []


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
