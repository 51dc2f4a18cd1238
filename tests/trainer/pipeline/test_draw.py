"""Timelines as grids of text, and the verb that prints them."""

import re

import pytest

from tests.trainer.support.training import ROOT, call
from threefold.errors import UserError
from trainer.pipeline.actions import PASSES, Action
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
    grid = draw(simulate(with_transfers(one_f_one_b(2, 2), 1), lambda action: costs[action.kind]))
    assert grid == "rank 0  F0 F1 .  .  B0--- .  B1\nrank 1  .  F0 B0--- F1 B1 .  ."


def test_the_verb_draws_and_sums_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("schedule", "--pp", 2, "--microbatches", 3) == 0
    out = capsys.readouterr().out
    assert out == f"{GRID}\n\n12 units, bubble 25.0%, live micro-batches by rank: 2 1\n"
    assert call("schedule", "--pp", 2, "--microbatches", 3, "--schedule", "gpipe", "--transfer", 0.5) == 0
    assert "live micro-batches by rank: 3 3" in capsys.readouterr().out


def test_the_page_and_its_picture_show_what_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    concepts = ROOT / "docs" / "concepts"
    page = (concepts / "pipeline-schedules.md").read_text()
    assert call("schedule", "--pp", 4, "--microbatches", 8) == 0
    assert page.split("```\n")[1] == capsys.readouterr().out
    timeline = simulate(with_transfers(one_f_one_b(4, 8)))
    picture = (concepts / "pictures" / "pipeline-schedules.svg").read_text()
    boxes = re.findall(r'<rect x="(\d+)" y="(\d+)" width="(\d+)".*stroke.*\n<text .*>([FB]\d+)<', picture)
    expected = []
    for rank, row in enumerate(timeline.schedule):
        for action in (action for action in row if action.kind in PASSES):
            start, end = timeline.spans[action]
            expected.append((f"{64 + 20 * start}", f"{44 + 38 * rank}", f"{20 * (end - start)}", str(action)))
    assert boxes == expected


def test_the_figures_of_the_page() -> None:
    page = (ROOT / "docs" / "concepts" / "pipeline-schedules.md").read_text()
    assert simulate(with_transfers(one_f_one_b(4, 32))).bubble_share == pytest.approx(3 / 35)
    assert "3 / 35 or 8.6%" in page
    costs = {"F": 1, "B": 2, "SF": 0.25, "SB": 0.25}
    durations = [
        simulate(with_transfers(one_f_one_b(4, 8), ahead), lambda action: costs[action.kind]).duration
        for ahead in (1, 0)
    ]
    assert durations == [37, 37.75]
    assert all(f"{duration:g} units" in page for duration in durations)
    rows = with_transfers(one_f_one_b(2, 2))
    first, second = (rows[1].index(Action(kind, 1, 0)) for kind in PASSES)
    rows[1][first], rows[1][second] = rows[1][second], rows[1][first]
    with pytest.raises(UserError) as caught:
        simulate(rows)
    assert caught.value.message.partition(": ")[2] in " ".join(page.split())
