"""Every schedule has each pass once, a backward pass after what it needs, and a bound of live micro-batches."""

from typing import get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from threefold.errors import UserError
from trainer.config import ParallelConfig
from trainer.pipeline.actions import PASSES, Action, peak_live, stage_ranks
from trainer.pipeline.gpipe import forward_only, gpipe
from trainer.pipeline.one_f_one_b import one_f_one_b
from trainer.pipeline.schedules import SCHEDULES, rank_actions
from trainer.pipeline.simulate import simulate

SIZES = {"num_stages": st.integers(1, 12), "num_microbatches": st.integers(1, 40)}


@given(name=st.sampled_from(sorted(SCHEDULES)), **SIZES)
def test_each_pass_is_there_once_and_after_what_it_needs(name: str, num_stages: int, num_microbatches: int) -> None:
    schedule = SCHEDULES[name](num_stages, num_microbatches)
    assert stage_ranks(schedule) == {stage: stage for stage in range(num_stages)}
    spans = simulate(schedule).spans
    assert spans.keys() == {
        Action(kind, stage, m) for kind in PASSES for stage in range(num_stages) for m in range(num_microbatches)
    }
    assert sum(map(len, schedule)) == len(spans)
    for (kind, stage, m), (start, _) in spans.items():
        if kind == "B":
            assert spans[Action("F", stage, m)][1] <= start, "after the stage's own forward pass"
        before = Action(kind, stage + 1 if kind == "B" else stage - 1, m)
        assert before not in spans or spans[before][1] <= start, "after the stage that it reads from"


@given(**SIZES)
def test_what_is_live_at_once_is_bounded(num_stages: int, num_microbatches: int) -> None:
    assert [peak_live(row) for row in gpipe(num_stages, num_microbatches)] == [num_microbatches] * num_stages
    bounds = [min(num_stages - stage, num_microbatches) for stage in range(num_stages)]
    assert [peak_live(row) for row in one_f_one_b(num_stages, num_microbatches)] == bounds


def test_rows_by_hand() -> None:
    assert [str(action) for action in one_f_one_b(4, 4)[1]] == ["F0", "F1", "F2", "B0", "F3", "B1", "B2", "B3"]
    assert [str(action) for action in gpipe(4, 2)[3]] == ["F0", "F1", "B0", "B1"]
    assert [str(action) for action in forward_only(2, 2)[1]] == ["F0", "F1"]
    assert rank_actions("gpipe", 1, 2, 0) == tuple(gpipe(1, 2)[0]), "one stage has nothing to transfer"


def test_the_configuration_names_all_schedules() -> None:
    assert set(get_args(get_type_hints(ParallelConfig)["schedule"])) == SCHEDULES.keys()


@pytest.mark.parametrize("sizes", [(0, 4), (2, 0)])
def test_a_schedule_that_cannot_be_is_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(UserError, match=r"no schedule for . stages with . micro-batches"):
        one_f_one_b(*sizes)
