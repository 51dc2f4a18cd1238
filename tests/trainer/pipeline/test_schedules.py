"""Every schedule has each pass once, a backward pass after what it needs, and a bound of live micro-batches."""

from typing import get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.model.layout import ParallelLayout, stage_rank
from threefold.errors import UserError
from trainer.config import ParallelConfig
from trainer.pipeline.actions import PASSES, Action, peak_live, peak_received, stage_ranks
from trainer.pipeline.schedules import SCHEDULES, forward_only, gpipe, one_f_one_b, rank_actions, with_transfers, zb_h1
from trainer.pipeline.simulate import simulate

SIZES = {"num_ranks": st.integers(1, 8), "num_microbatches": st.integers(1, 24), "virtual": st.integers(1, 3)}
NAMES = st.sampled_from(sorted(SCHEDULES))


@given(name=NAMES, **SIZES)
def test_each_pass_is_there_once_and_after_what_it_needs(
    name: str, num_ranks: int, num_microbatches: int, virtual: int
) -> None:
    schedule = SCHEDULES[name](num_ranks, num_microbatches, virtual)
    layout = ParallelLayout(pp=num_ranks, virtual=virtual)
    assert stage_ranks(schedule) == {stage: stage_rank(layout, stage) for stage in range(layout.num_stages)}
    for rows in (schedule, with_transfers(schedule)):
        spans = simulate(rows, blocking=True).spans
        assert sum(map(len, rows)) == len(spans)
    spans = {action: span for action, span in spans.items() if action.kind in PASSES}
    kinds = [kind for kind in PASSES if kind != "W" or name == "zb-h1"]
    assert spans.keys() == {
        Action(kind, stage, m) for kind in kinds for stage in range(layout.num_stages) for m in range(num_microbatches)
    }
    for (kind, stage, m), (start, _) in spans.items():
        if kind != "F":
            own = Action("F" if kind == "B" else "B", stage, m)
            assert spans[own][1] <= start, "after the stage's own pass"
        before = Action(kind, stage + {"F": -1, "B": 1, "W": 0}[kind], m)
        assert before == (kind, stage, m) or before not in spans or spans[before][1] <= start, "what it reads"


@given(**SIZES)
def test_what_is_live_at_once_is_bounded(num_ranks: int, num_microbatches: int, virtual: int) -> None:
    sizes, num_passes = (num_ranks, num_microbatches, virtual), num_microbatches * virtual
    assert [peak_live(row) for row in gpipe(*sizes)] == [num_passes] * num_ranks
    largest = -(-num_microbatches // max(num_microbatches // num_ranks, 1))  # group of micro-batches
    for rank, (one, zero) in enumerate(zip(one_f_one_b(*sizes), zb_h1(*sizes), strict=True)):
        after = num_ranks - 1 - rank
        bound = after + 1 if virtual == 1 else (virtual - 1) * largest + 2 * after + 1
        assert peak_live(one) == min(bound, num_passes)
        assert peak_live(zero) == min(bound + rank, num_passes)
        if virtual == 1:
            assert peak_live(zero) == min(num_ranks, num_microbatches)


def test_the_weights_of_what_is_live_are_those_before_and_after_its_backward_pass() -> None:
    row = zb_h1(2, 3)[1]
    assert " ".join(map(str, row)) == "F0 B0 F1 B1 W0 F2 B2 W1 W2"
    assert [peak_live(row, *weights) for weights in ((1, 1), (1, 0), (2, 3), (0, 1))] == [2, 1, 6, 2]


def test_one_tensor_more_comes_at_once_if_it_is_asked_for_a_pass_ahead() -> None:
    for name, make in SCHEDULES.items():
        for virtual in (1, 2, 3):
            assert max(map(peak_received, with_transfers(make(3, 6, virtual), None))) == 2
            assert {peak_received(rank_actions(name, 3, 6, virtual, rank)) for rank in range(3)} == {1}
    assert [peak_received(row) for row in with_transfers(zb_h1(3, 6), None)] == [1, 2, 1]


def test_rows_by_hand() -> None:
    assert [str(action) for action in one_f_one_b(4, 4)[1]] == ["F0", "F1", "F2", "B0", "F3", "B1", "B2", "B3"]
    assert [str(action) for action in gpipe(4, 2)[3]] == ["F0", "F1", "B0", "B1"]
    assert [str(action) for action in forward_only(2, 2)[1]] == ["F0", "F1"]
    interleaved = one_f_one_b(2, 4, 2)[1]  # stages 1 and 3
    assert [action.stage for action in interleaved] == [1, 1, 3, 3, 3, 3, 1, 1, 1, 1, 3, 3, 3, 3, 1, 1]
    assert " ".join(map(str, interleaved)) == "F0 F1 F0 B0 F1 B1 F2 B0 F3 B1 F2 B2 F3 B3 B2 B3"
    assert rank_actions("gpipe", 1, 2, 1, 0) == tuple(gpipe(1, 2)[0]), "one stage has nothing to transfer"


def test_the_configuration_names_all_schedules() -> None:
    assert set(get_args(get_type_hints(ParallelConfig)["schedule"])) == SCHEDULES.keys()


@pytest.mark.parametrize("sizes", [(0, 4), (2, 0), (2, 4, 0)])
def test_a_schedule_that_cannot_be_is_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"no schedule for . ranks of . stages with . micro-batches"):
        one_f_one_b(*sizes)
