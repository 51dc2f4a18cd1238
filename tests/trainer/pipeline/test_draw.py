"""Timelines as grids of text, and the verb that prints them."""

import pytest

from tests.trainer.support.training import call
from trainer.pipeline.draw import draw
from trainer.pipeline.one_f_one_b import one_f_one_b
from trainer.pipeline.passes import with_transfers
from trainer.pipeline.simulate import simulate

GRID = """\
rank 0  F0 F1 .  .  B0--- F2 B1--- .  B2---
rank 1  .  F0 B0--- F1 B1--- F2 B2--- .  ."""


def test_a_grid_is_drawn_to_scale() -> None:
    timeline = simulate(with_transfers(one_f_one_b(2, 3)))
    assert draw(timeline) == GRID
    halves = [line.split("\n") for line in draw(timeline, width=26).split("\n\n")]
    assert [len(half) for half in halves] == [2, 2]
    assert halves[0] == ["rank 0  F0 F1 .  .  B0---", "rank 1  .  F0 B0--- F1 B1-"]
    assert halves[1] == ["rank 0  F2 B1--- .  B2---", "rank 1  -- F2 B2--- .  ."]


def test_times_between_two_cells_go_to_the_nearest_cell() -> None:
    costs = {"F": 1.0, "B": 1.5, "SF": 0.25, "SB": 0.25}
    grid = draw(simulate(with_transfers(one_f_one_b(2, 2)), lambda action: costs[action.kind]))
    assert grid == "rank 0  F0 F1 .  .  B0--- .  B1\nrank 1  .  F0 B0--- F1 B1 .  ."


def test_the_verb_draws_and_sums_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("schedule", "--pp", 2, "--microbatches", 3) == 0
    out = capsys.readouterr().out
    assert out == f"{GRID}\n\n12 units, bubble 25.0%, live micro-batches by rank: 2 1\n"
    assert call("schedule", "--pp", 2, "--microbatches", 3, "--schedule", "gpipe", "--transfer", 0.5) == 0
    assert "live micro-batches by rank: 3 3" in capsys.readouterr().out
