"""The table of peers after a loss of power counts what is lost, what loads wrong, and a newest step that fails."""

import sys
from pathlib import Path

import pytest

from benchmarks.ckptkit.power_loss import Verdict, explored
from benchmarks.ckptkit.power_loss_peers import PEERS
from tests.support.strace import needs_strace

RIGHT = {1: "one", 2: "two"}


class Answers:
    """A reader whose answers are known: by step, with 0 for the newest."""

    def __init__(self, *, one: str = "one", two: str = "two", newest: tuple[int, str] = (2, "two")) -> None:
        self.loaded = {0: newest, 1: (1, one) if one else (-1, "gone"), 2: (2, two) if two else (-1, "torn")}

    def read(self, folder: Path, step: int) -> tuple[int, str]:
        return self.loaded[step]


@pytest.mark.parametrize(
    ("answers", "promises", "counts"),
    [
        (Answers(), ["step 1", "step 2"], (0, 0, 0)),
        (Answers(two="", newest=(1, "one")), ["step 1"], (0, 0, 0)),  # nobody promised it
        (Answers(two="", newest=(1, "one")), ["step 1", "step 2"], (1, 0, 1)),
        (Answers(two="other"), ["step 1"], (0, 1, 0)),
        (Answers(one="other"), ["step 1"], (1, 1, 0)),
        (Answers(two="", newest=(-1, "torn")), ["step 1"], (0, 0, 1)),  # found, and not passed over
        (Answers(one="", two="", newest=(-1, "none")), [], (0, 0, 0)),
    ],
)
def test_what_is_wrong_with_a_tree_is_counted(answers: Answers, promises: list[str], counts: tuple[int, ...]) -> None:
    verdict = Verdict("peer", "weakest", newest=0)
    verdict.look(answers, RIGHT, Path("folder"), promises)  # type: ignore[arg-type]
    assert (verdict.trees, verdict.lost, verdict.wrong, verdict.newest) == (1, *counts)


@needs_strace
@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("name", ["ckptkit", "datakit"])
def test_of_this_project_nothing_is_lost(name: str) -> None:
    for verdict in explored(name, sys.executable):
        assert verdict.trees > 20
        assert (verdict.lost, verdict.wrong, verdict.newest or 0) == (0, 0, 0)


@needs_strace
@pytest.mark.slow
@pytest.mark.ci
def test_a_program_without_fsync_loses_what_it_promised() -> None:
    """Of torch's, as of any program that syncs no name."""
    pytest.importorskip("torch")
    [weakest, _] = explored("dcp", sys.executable)
    assert weakest.lost > 10
    assert weakest.examples["lost"].startswith("step 1: ")
    assert "dcp" in PEERS
