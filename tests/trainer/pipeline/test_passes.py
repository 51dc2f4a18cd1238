"""Transfers pair up in the order that both ends expect, and receives are posted as early as asked."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.pipeline.actions import PASSES, Action
from trainer.pipeline.schedules import forward_only, gpipe, one_f_one_b, with_transfers, zb_h1

MAKERS = st.sampled_from([gpipe, one_f_one_b, forward_only, zb_h1])


def names(row: list[Action]) -> str:
    return " ".join(map(str, row))


def test_rows_by_hand() -> None:
    rows = [with_transfers(one_f_one_b(2, 2), ahead) for ahead in (0, 1)]
    assert names(rows[0][0]) == "F0 SF0 F1 SF1 RB0 B0 RB1 B1"
    assert names(rows[0][1]) == "RF0 F0 B0 SB0 RF1 F1 B1 SB1"
    assert names(rows[1][0]) == "F0 SF0 RB0 F1 SF1 RB1 B0 B1"
    assert names(rows[1][1]) == "RF0 F0 RF1 B0 SB0 F1 B1 SB1"
    safe = with_transfers(zb_h1(2, 3), None)
    assert names(safe[0]) == "F0 SF0 F1 SF1 RB0 B0 W0 RB1 F2 SF2 B1 RB2 W1 B2 W2"
    assert names(safe[1]) == "RF0 F0 RF1 B0 SB0 F1 B1 SB1 RF2 W0 F2 B2 SB2 W1 W2"
    assert names(with_transfers(one_f_one_b(2, 3), None)[0]) == "F0 SF0 F1 SF1 RB0 B0 F2 SF2 RB1 RB2 B1 B2"


@given(make=MAKERS, num_ranks=st.integers(1, 6), num_microbatches=st.integers(1, 12), virtual=st.integers(1, 3),
       ahead=st.none() | st.integers(0, 3))  # fmt: skip
def test_both_ends_of_a_link_have_one_order(
    make, num_ranks: int, num_microbatches: int, virtual: int, ahead: int | None
) -> None:
    schedule = make(num_ranks, num_microbatches, virtual)
    rows = with_transfers(schedule, ahead)
    assert [[action for action in row if action.kind in PASSES] for row in rows] == schedule
    for rank in range(num_ranks if num_ranks > 1 else 0):
        follows = rows[(rank + 1) % num_ranks]
        sent = [(stage + 1, m) for kind, stage, m in rows[rank] if kind == "SF"]
        assert sent == [(stage, m) for kind, stage, m in follows if kind == "RF"]
        num_links = virtual - (rank == num_ranks - 1)  # of the rank's stages to the next ones
        assert len(sent) == len(set(sent)) == num_links * num_microbatches
        back = [(stage - 1, m) for kind, stage, m in follows if kind == "SB"]
        assert back == [(stage, m) for kind, stage, m in rows[rank] if kind == "RB"]
        assert sorted(back) == sorted((stage - 1, m) for stage, m in sent if make is not forward_only)
    for row in rows:
        passes = [action for action in row if action.kind in PASSES]
        for place, action in enumerate(row):
            if action.kind in ("RF", "RB"):
                reader = passes.index(Action("F" if action.kind == "RF" else "B", *action[1:]))
                before = sum(earlier.kind in PASSES for earlier in row[:place])
                places = [max(reader - ahead, 0)] if ahead is not None else [reader, reader - 1]
                assert before in places


def test_stages_of_one_rank_pass_tensors_on_without_a_transfer() -> None:
    together = [[Action("F", 0, 0), Action("F", 1, 0), Action("B", 1, 0), Action("B", 0, 0)]]
    assert with_transfers(together) == together


@pytest.mark.parametrize("ahead", [None, 0, 1, 2])
def test_a_v_of_stages_sends_only_between_ranks(ahead: int | None) -> None:
    v = [
        [Action("F", 0, 0), Action("F", 3, 0), Action("B", 3, 0), Action("B", 0, 0)],
        [Action("F", 1, 0), Action("F", 2, 0), Action("B", 2, 0), Action("B", 1, 0)],
    ]
    found = {(action.kind, action.stage) for row in with_transfers(v, ahead) for action in row} - {
        (action.kind, action.stage) for row in v for action in row
    }
    assert found == {("SF", 0), ("RF", 1), ("SF", 2), ("RF", 3), ("SB", 3), ("RB", 2), ("SB", 1), ("RB", 0)}
