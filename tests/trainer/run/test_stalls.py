"""Stalls that are planted in runs are named with rank, stage, micro-batch and collective; slow runs are left alone.

All of them are rows of benchmarks/trainer/stalls.py.
"""

import importlib

import pytest

from tests.trainer.support.training import ROOT

SAID = (
    "late: rank {rank} (host a, pid 7) is stopped (by SIGSTOP): step 3, where it trains, {action}, micro-batch 1, for"
)
ROWS = [
    ("tp2-pp2", 2, "collective", "stop"),
    ("pp2", 1, "B", "stop"),
    ("dp2", 0, "save", "child"),
]


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_a_planted_stall_is_named_and_slow_work_is_not(row: tuple[str, int, str, str]) -> None:
    stalls = importlib.import_module("benchmarks.trainer.stalls")
    case = stalls.Case(*row)
    assert case in [*stalls.STALLS, *stalls.SOUND]
    is_right, said = stalls.outcome(case)
    assert is_right, said


def test_the_table_has_what_is_promised() -> None:
    stalls = importlib.import_module("benchmarks.trainer.stalls")
    assert len(stalls.STALLS) == len(set(stalls.STALLS)) == 30
    assert len(stalls.SOUND) == len(set(stalls.SOUND)) == 10
    assert {case.layout for case in stalls.STALLS} == {"tp2", "pp2", "dp2", "tp2-pp2"}
    assert (ROOT / "benchmarks" / "trainer" / "stalls.py").exists()


@pytest.mark.parametrize(
    ("output", "is_right"),
    [
        (SAID.format(rank=1, action="F of stage 1"), 1),
        (SAID.format(rank=0, action="F of stage 1"), 0),
        (SAID.format(rank=1, action="F of stage 0"), 0),
        (SAID.format(rank=1, action="B of stage 1"), 0),
        ("nothing within 120 s", 0),
    ],
)
def test_a_report_of_another_place_is_wrong(output: str, is_right: int) -> None:
    stalls = importlib.import_module("benchmarks.trainer.stalls")
    assert stalls.judged(stalls.Case("pp2", 1, "F"), output)[0] == bool(is_right)
