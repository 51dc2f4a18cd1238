"""Schedules run without deadlock under bounded sends, timelines have known figures, and planted faults are named."""

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from threefold.errors import UserError
from trainer.pipeline.actions import PASSES, Action
from trainer.pipeline.ahead import posted_ahead
from trainer.pipeline.schedules import SCHEDULES, forward_only, gpipe, one_f_one_b, with_transfers, zb_h1
from trainer.pipeline.simulate import Timeline, costs, simulate

MAKERS = [gpipe, one_f_one_b, forward_only, zb_h1]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_no_schedule_waits_for_ever(make, ahead: int) -> None:
    for num_ranks in range(1, 6):
        for num_microbatches in range(1, 9):
            rows = with_transfers(make(num_ranks, num_microbatches), ahead)
            timeline = simulate(rows, max_sends=1, blocking=not ahead)
            assert len(timeline.spans) == sum(map(len, rows))


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("virtual", [1, 2, 3])
def test_no_schedule_of_many_waits_for_ever(make, virtual: int) -> None:
    for num_ranks in range(1, 9):
        for num_microbatches in range(1, 3 * num_ranks + 2):
            rows = with_transfers(make(num_ranks, num_microbatches, virtual))
            for blocking in (True, False):
                assert len(simulate(rows, blocking=blocking).spans) == sum(map(len, rows))


def test_posting_ahead_on_both_ends_is_a_deadlock_if_a_gpu_waits_for_all_its_kernels() -> None:
    """Two GPUs whose receives were all posted a pass ahead never finished a step."""
    for make in (gpipe, one_f_one_b):
        with pytest.raises(UserError, match="rank 0 at F1 of stage 0 waits for RB0"):
            simulate(with_transfers(make(2, 2), ahead=1), blocking=True)
    for make in SCHEDULES.values():
        for num_ranks in (2, 3, 4):
            with pytest.raises(UserError, match="deadlock"):
                simulate(with_transfers(make(num_ranks, 8), ahead=1), blocking=True)
            simulate(with_transfers(make(num_ranks, 8), None), blocking=True)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    ("most_ranks", "most_virtual"),
    [(3, 2), pytest.param(8, 4, marks=[pytest.mark.slow, pytest.mark.ci])],
)
def test_no_cycle_of_waits_is_left_by_what_is_posted_ahead(make, most_ranks: int, most_virtual: int) -> None:
    for num_ranks in range(2, most_ranks + 1):
        for virtual in range(1, most_virtual + 1):
            for num_microbatches in range(1, 2 * most_ranks + 1):
                schedule = make(num_ranks, num_microbatches, virtual)
                rows = with_transfers(schedule, None)
                assert len(simulate(rows, blocking=True).spans) == sum(map(len, rows))


@given(
    make=st.sampled_from(MAKERS),
    sizes=st.tuples(*map(st.integers, (2, 1, 1), (6, 16, 3))),
    transfer=st.floats(0.001, 0.1),
)
def test_posting_ahead_where_it_is_safe_never_costs_time(make, sizes: tuple[int, ...], transfer: float) -> None:
    schedule = make(*sizes)
    slow = costs(schedule, transfer=transfer)
    late, early, earliest = (simulate(with_transfers(schedule, ahead), slow).duration for ahead in (0, None, 1))
    assert earliest <= early + 1e-9 <= late + 2e-9


@given(data=st.data(), make=st.sampled_from(MAKERS), sizes=st.tuples(*map(st.integers, (2, 1, 1), (5, 12, 3))))
def test_each_receive_that_comes_later_would_close_a_cycle(data: st.DataObject, make, sizes: tuple[int, ...]) -> None:
    """Of F and B that take turns it would win little."""
    schedule = make(*sizes)
    rows, early = with_transfers(schedule, None), posted_ahead(schedule)
    late = [
        (row, action)
        for row in rows
        for action in row[row.index(next(action for action in row if action.kind in PASSES)) :]
        if action.kind in ("RF", "RB") and Action("F" if action.kind == "RF" else "B", *action[1:]) not in early
    ]
    if not late or (sizes[2] == 1 and make is one_f_one_b):
        return
    row, receive = data.draw(st.sampled_from(late))
    place = row.index(receive)
    before = max(number for number, action in enumerate(row[:place]) if action.kind in PASSES)
    row.insert(before, row.pop(place))
    with pytest.raises(UserError, match="deadlock"):
        simulate(rows, blocking=True)


SIZES = {"num_ranks": st.integers(1, 6), "extra": st.integers(0, 6), "virtual": st.integers(1, 3)}


@given(**SIZES, backward=st.integers(1, 4))
def test_the_bubble_is_that_of_warming_up_and_draining(num_ranks: int, extra: int, virtual: int, backward: int) -> None:
    num_microbatches, ends = num_ranks + extra, num_ranks - 1
    for make, num_stages in ((gpipe, 1), (one_f_one_b, virtual)):
        schedule = make(num_ranks, num_microbatches, num_stages)
        timeline = simulate(with_transfers(schedule), costs(schedule, backward=backward))
        assert timeline.duration == pytest.approx((num_microbatches + ends / num_stages) * (1 + backward))
        expected = ends / (num_stages * num_microbatches + ends)
        assert timeline.bubble_share == pytest.approx(expected, abs=1e-12)


@given(**SIZES)
def test_zero_bubble_waits_for_a_third_if_its_passes_take_as_long(num_ranks: int, extra: int, virtual: int) -> None:
    num_microbatches = num_ranks + extra
    timeline = simulate(with_transfers(zb_h1(num_ranks, num_microbatches, virtual)))
    assert timeline.duration == pytest.approx(3 * num_microbatches + (num_ranks - 1) / virtual)


def test_a_stage_of_more_work_makes_others_wait() -> None:
    schedule = one_f_one_b(2, 4)
    found = costs(schedule, transfer=0.5, work=(1, 3))
    assert [found(Action(kind, stage, 0)) for kind in "FB" for stage in (0, 1)] == [0.5, 1.5, 1, 3]  # type: ignore[arg-type]
    assert found(Action("SF", 0, 0)) == 0.5
    timeline = simulate(with_transfers(schedule), costs(schedule, work=(1, 3)))
    assert timeline.duration == 0.5 + 4 * 4.5 + 1
    split = costs(zb_h1(2, 4), backward=3, weights=2)
    assert [split(Action(kind, 0, 0)) for kind in ("F", "B", "W")] == [1, 1, 2]


def test_figures_by_hand() -> None:
    timeline = simulate(with_transfers(one_f_one_b(4, 8)))
    assert (timeline.duration, timeline.peaks) == (33, [4, 3, 2, 1])
    assert timeline.bubble_share == pytest.approx(3 / 11)
    assert timeline.spans[Action("B", 3, 0)] == (4, 6)
    assert str(timeline) == "33 units, bubble 27.3%, live micro-batches by rank: 4 3 2 1"
    # rank 1 of 2: F0 ends at 1 and travels until 3; B0 ends at 6 there and its gradient arrives at 8
    slow = simulate(with_transfers(one_f_one_b(2, 1)), costs(one_f_one_b(2, 1), transfer=2))
    assert slow.spans[Action("SF", 0, 0)] == slow.spans[Action("RF", 1, 0)] == (1, 3)
    assert [slow.spans[Action("SB", 1, 0)], slow.spans[Action("B", 0, 0)]] == [(6, 8), (8, 10)]


@given(seed=st.integers(0, 2**32), make=st.sampled_from(MAKERS))
def test_posting_ahead_never_costs_time_and_two_sends_are_enough_for_1f1b(seed: int, make) -> None:
    def cost(action: Action) -> float:
        return random.Random(f"{seed} {action!r}").randint(1, 10 * (1 + (action.kind == "B")))

    schedule = make(4, 8)
    durations = [simulate(with_transfers(schedule, ahead), cost).duration for ahead in (0, 1, 2)]
    assert durations == sorted(durations, reverse=True)
    if make is one_f_one_b:
        assert simulate(with_transfers(schedule, 1), cost, max_sends=8).duration == durations[1]


def timeline_or_fault(rows: list[list[Action]]) -> Timeline | UserError:
    try:
        return simulate(rows)
    except UserError as fault:
        return fault


@given(data=st.data(), make=st.sampled_from(MAKERS), ahead=st.integers(0, 2))
def test_two_swapped_actions_are_found_and_named(data: st.DataObject, make, ahead: int) -> None:
    rows = with_transfers(make(data.draw(st.integers(2, 5)), data.draw(st.integers(2, 6))), ahead)
    row = rows[data.draw(st.integers(0, len(rows) - 1))]
    first, second = sorted(data.draw(st.lists(st.integers(0, len(row) - 1), min_size=2, max_size=2, unique=True)))
    row[first], row[second] = row[second], row[first]
    outcome = timeline_or_fault(rows)
    if isinstance(outcome, UserError):
        named = set(re.findall(r"[A-Z]+\d+", outcome.message))
        swapped = {str(row[first]), str(row[second])}
        received = {f"R{name[1:]}" for name in swapped if name[0] == "S"}  # what waits for one that is sent too late
        assert named & (swapped | received), outcome.message
        assert "trainer schedule" in str(outcome.hint)
    else:  # an order that runs too: each kind keeps its order, and nothing starts before what it needs
        assert row[first].kind != row[second].kind
        for (kind, stage, m), (start, _) in outcome.spans.items():
            before = Action(kind, stage + 1 if kind == "B" else stage - 1, m)
            assert kind not in ("F", "B") or before not in outcome.spans or outcome.spans[before][1] <= start


@pytest.mark.parametrize(
    ("places", "text"),
    [
        ((1, 0, 1), "rank 1 at F0 of stage 1 waits for RF0 of stage 1"),
        ((1, 1, 2), "B0 of stage 1 waits for F0 of stage 1"),
        ((0, 0, 2), "F1 of stage 0 comes before F0"),
    ],
)
def test_faults_by_hand(places: tuple[int, int, int], text: str) -> None:
    rank, first, second = places
    rows = with_transfers(one_f_one_b(2, 2), 0)
    rows[rank][first], rows[rank][second] = rows[rank][second], rows[rank][first]
    with pytest.raises(UserError, match=re.escape(text)):
        simulate(rows)


def test_a_missing_action_is_named() -> None:
    rows = with_transfers(one_f_one_b(2, 2))
    without = [[action for action in row if action != Action("SF", 0, 1)] for row in rows]
    with pytest.raises(UserError, match="waits for RF1 of stage 1"):
        simulate(without)
    for row in rows:
        row[:] = [action for action in row if action.kind != "B" or action.microbatch == 0]
    with pytest.raises(UserError, match="B1 of stage 0 is missing"):
        simulate(rows)
    with pytest.raises(UserError, match="F0 of stage 0 is on rank 0, others of the stage on rank 1"):
        simulate([[Action("F", 0, 0)], [Action("F", 0, 1)]])
    with pytest.raises(UserError, match="SF0 of stage 0 has no other end"):
        simulate([[Action("F", 0, 0), Action("SF", 0, 0)], []])


def test_a_rank_with_several_stages_needs_more_sends_under_way() -> None:
    """Where ranks do not divide the micro-batches: two groups of 6 and 5 on 4 ranks need 6 - 4 + 1."""
    rows = with_transfers(one_f_one_b(4, 11, 2), 0)
    with pytest.raises(UserError, match=r"rank 3 at SF. of stage 3 waits for SF"):
        simulate(rows, max_sends=2)
    assert simulate(rows, max_sends=3).duration == simulate(rows).duration == 3 * 11 + 3 * 3 / 2


def test_a_w_that_is_left_out_played_twice_or_too_early_is_named() -> None:
    rows = with_transfers(zb_h1(2, 3))
    w1 = rows[0].index(Action("W", 0, 1))
    faults = {
        "W2 of stage 0 comes before W1": [*rows[0][:w1], *rows[0][w1 + 1 :]],
        "W1 of stage 0 comes before W2": [*rows[0][: w1 + 1], *rows[0][w1:]],
        "rank 0 at W0 of stage 0 waits for B0 of stage 0": [Action("W", 0, 0), *without(rows[0], 0)],
        "W2 of stage 0 is missing": without(rows[0], 2),
    }
    for text, row in faults.items():
        with pytest.raises(UserError, match=re.escape(text)):
            simulate([row, rows[1]])


def without(row: list[Action], microbatch: int) -> list[Action]:
    return [action for action in row if (action.kind, action.microbatch) != ("W", microbatch)]
