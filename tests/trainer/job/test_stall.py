"""Of ranks that make no progress the one that others wait for is named, by what their pages say."""

import re
from dataclasses import replace

import pytest

from trainer.job.sight import Record, Sight, label_of
from trainer.job.stall import Stall


def sight(
    rank: int, *, call: str = "", group: str = "", sequence: int = 0, process: str = "", **place: object
) -> Sight:
    """A rank that waits in a call, if it has one; its counts are of that call's group."""
    now = Record(
        9, 0, 5, "trains", **{"kind": "F", **place}, call=call, waits=bool(call), group=group, sequence=sequence
    )
    counts = {group: sequence} if group else {}
    return Sight(rank, 4, 100 + rank, "node", "runs", 3, now, 50.0, counts, process=process)


def stall(*sights: Sight, world_size: int = 0) -> Stall:
    return Stall({each.rank: each for each in sights}, world_size or len(sights), 50.0)


DP, TP, WORLD = label_of("dp", [0, 2]), label_of("tp", [0, 1]), label_of("world", range(4))


def test_the_end_of_a_chain_of_waits_is_late() -> None:
    """0 waits for 1 in tp, and 1 for 3 at its link, which 3 has not sent on."""
    link = label_of("activations", [1, 3])
    ranks = [
        sight(0, call="all_gather", group=TP, sequence=7),
        sight(1, call="receive", group=link, sequence=4),
        sight(2, call="all_reduce", group=WORLD, sequence=2),
        sight(3, stage=1, microbatch=6),
    ]
    report = stall(*ranks)
    assert report.late == (3,)
    assert report.cause_lines == [
        "late: rank 3 (host node, pid 103): step 5, where it trains, F of stage 1, micro-batch 6, for 50 s; "
        "ranks 1, 2 wait for it"
    ]
    assert report.hint == "on node: py-spy dump --pid 103 prints where it is in the code"


def test_who_has_begun_a_call_is_not_waited_for_in_it() -> None:
    ranks = [sight(0, call="all_reduce", group=DP, sequence=7), sight(2)]
    begun = replace(ranks[1], counts={DP: 7})
    assert stall(*ranks).waits_for == {0: (2,)}
    assert stall(ranks[0], begun).waits_for == {0: ()}


def test_a_stopped_rank_is_late_in_the_call_that_all_have_begun() -> None:
    ranks = [sight(rank, call="all_reduce", group=WORLD, sequence=3) for rank in range(4)]
    ranks[2] = replace(ranks[2], process="stopped (by SIGSTOP)")
    found = stall(*ranks)
    assert found.late == (2,)
    assert "ranks 0, 1, 3 wait for it" in found.cause_lines[0]
    assert found.hint == "on node: kill -CONT 102 lets it go on"


def test_a_call_that_all_have_begun_and_that_does_not_end_is_said() -> None:
    found = stall(*(sight(rank, call="all_reduce", group=WORLD, sequence=3) for rank in range(4)))
    assert found.late == ()
    assert found.cause_lines == [
        "all ranks have begun the call that they wait for, which does not end: all_reduce #3 of group world, ranks 0-3"
    ]


def test_ranks_that_wait_for_each_other_are_a_deadlock() -> None:
    ranks = [sight(0, call="receive", group="a, ranks 0, 1", sequence=1), sight(1, call="send", group=TP, sequence=1)]
    assert "the ranks wait for each other" in stall(*ranks).cause_lines[0]


def test_a_rank_that_nobody_sees_is_late() -> None:
    found = stall(sight(0, call="all_reduce", group=WORLD, sequence=1), world_size=2)
    assert found.late == (1,)
    assert found.cause_lines == ["late: rank 1, of which nothing was heard"]


@pytest.mark.parametrize(
    ("process", "hint"),
    [("gone", "dmesg"), ("in a system call that does not return (state D)", "sudo cat /proc/101/stack")],
)
def test_the_hint_is_of_what_the_process_does(process: str, hint: str) -> None:
    ranks = [sight(0, call="all_gather", group=TP, sequence=7), sight(1, process=process)]
    assert stall(*ranks).late == (1,)
    assert hint in stall(*ranks).hint


def test_the_table_has_a_row_a_rank_the_late_one_first() -> None:
    ranks = [sight(0, call="all_gather", group=TP, sequence=7), sight(1, stage=1, microbatch=2)]
    lines = stall(*ranks).lines
    assert lines[0] == "no rank has made progress for 50 s, in step 5"
    assert re.split(r"\s\s+", lines[-2].strip()) == ["1", "node", "101", "runs", "5", "F", "1", "2", "-", "50 s"]
    waits = "in all_gather #7 of group tp, ranks 0, 1"
    assert re.split(r"\s\s+", lines[-1].strip()) == ["0", "node", "100", "runs", "5", "F", "0", "0", waits, "50 s"]


def test_a_sight_travels_as_json() -> None:
    before = sight(1, call="send", group=TP, sequence=2)
    assert Sight.from_json(before.to_json()) == before
