"""Timelines as grids of text, and the verb that prints them."""

import re
from pathlib import Path

import pytest

from tests.trainer.support.training import ROOT, call
from threefold.errors import UserError
from trainer.pipeline.actions import PASSES, Action
from trainer.pipeline.draw import draw
from trainer.pipeline.schedules import SCHEDULES, one_f_one_b, with_transfers, zb_h1
from trainer.pipeline.simulate import costs, measured_costs, simulate

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
    slow = "schedule", "--pp", 2, "--microbatches", 4, "--schedule", "zb-h1", "--transfer", 0.1
    assert [call(*slow), call(*slow, "--receive-ahead")] == [0, 0]
    assert re.findall(r"(\S+) units", capsys.readouterr().out) == ["13.5", "13.4"]


def test_a_pass_that_is_far_shorter_than_others_may_have_no_cell() -> None:
    schedule = one_f_one_b(2, 2)
    assert draw(simulate(schedule, costs(schedule, work=(1, 40)))).splitlines() == [
        "rank 0  " + ".  " * 17 + "B0 " + ".  " * 16 + "B1",
        "rank 1  " + " ".join([f"F{m}{'-' * 15} B{m}{'-' * 30}" for m in range(2)]) + " .",
    ]


def test_measured_times_are_in_units_of_a_ranks_forward_pass() -> None:
    times = {("F", 0): 0.1, ("F", 1): 0.3, ("B", 0): 0.2, ("B", 1): 0.4, ("W", 0): 0.1, ("W", 1): 0.2}
    whole = measured_costs(one_f_one_b(2, 2), times, transfer=0.5)
    parts = measured_costs(zb_h1(2, 2), times)
    for action, expected in ((Action("F", 0, 1), 0.5), (Action("B", 1, 0), 3.0), (Action("SF", 0, 0), 0.5)):
        assert whole(action) == pytest.approx(expected)
    assert [parts(Action(kind, 1, 0)) for kind in PASSES] == pytest.approx([1.5, 2.0, 1.0])


def test_the_letter_of_a_pass_is_that_of_its_stage() -> None:
    grid = draw(simulate(with_transfers(one_f_one_b(2, 2, 2)))).splitlines()
    assert grid[1] == "rank 1  .   F0a F1a F0b B0b---- F1b B1b---- B0a---- B1a---- .   ."


def write_run(folder: Path) -> Path:
    (folder / "run.toml").write_text(
        "[model]\nnum_layers = 5\nhidden_size = 96\nnum_heads = 3\nvocab_size = 10000\n[train]\nseq_length = 8\n"
        'global_batch_size = 6\ndevice = "cpu"\n[parallel]\npp = 2\nvirtual_stages = 2\nschedule = "zb-h1"\n'
    )
    return folder / "run.toml"


def test_the_verb_takes_a_run_and_flags_win(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path)
    assert call("schedule", run) == 0
    out = capsys.readouterr().out
    assert out.count("W5b") == 2
    assert out.endswith("live micro-batches by rank: 2.5 2\n")
    assert call("schedule", run, "--vpp", 1, "--schedule", "1f1b", "--dp", 3, "--plot", tmp_path / "a.png") == 0
    layer, head = 6 * (16 * 96**2 + 2 * 96) + 12 * 96 * 8, 6 * 10000 * 96  # of forward and backward
    first, last = (2 * flops / (5 * layer + head) for flops in (3 * layer, 2 * layer + head))
    found = re.search(
        r"([0-9.]+) units", capsys.readouterr().out
    )  # rank 0 waits for the head: F0 of 0, all of 1, B1 of 0
    assert found is not None
    assert float(found[1]) == pytest.approx(3 * first + 6 * last, rel=1e-3)
    assert (tmp_path / "a.png").read_bytes()[1:4] == b"PNG"


SHARDED = "dp = 6\nzero_stage = 3\ndp_shard = 3\nzero_whole_kib = 0\n"


@pytest.mark.parametrize(("parallel", "flags"), [("", []), ("", ["--vpp", 1, "--schedule", "1f1b"]), (SHARDED, [])])
def test_the_verb_times_the_stages_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], parallel: str, flags: list
) -> None:
    run = write_run(tmp_path)
    run.write_text(run.read_text() + parallel)
    assert call("schedule", run, "--measure", *flags) == 0
    said = capsys.readouterr()
    found = re.findall(r"^stage (\d): F (.*) ms, B (.*) ms, W (.*) ms$", said.err, re.MULTILINE)
    assert [int(stage) for stage, *_ in found] == list(range(2 if flags else 4))
    assert all(float(time) > 0 for _, *times in found for time in times)
    assert "live micro-batches by rank: " in said.out


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--work", "1,2"], "--work has a number above 0 for each of 4 stages, got 1.0,2.0"),
        (["--weights", 2], "--weights 2 is a part of --backward 2, and so must be less"),
        (["--measure"], "--measure times the stages of a run"),
        (["--plot", "a.jpg"], "a plot is a .png file, not a.jpg"),
        (["none.toml"], "no configuration file none.toml"),
    ],
)
def test_what_cannot_be_drawn_is_one_error(flags: list, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("schedule", *flags) == 2
    assert text in capsys.readouterr().err
    with pytest.raises(SystemExit):
        call("schedule", "--work", "1,x")
    assert "'1,x': each must be a number" in capsys.readouterr().err


def test_the_page_and_its_picture_show_what_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    concepts = ROOT / "docs" / "concepts"
    page = (concepts / "pipeline-schedules.md").read_text()
    pairs = re.findall(r"`trainer (schedule --pp \d[^`]*)`[^`]*```\n(rank 0.*?)```", page, re.DOTALL)
    assert len(pairs) == page.count("```\nrank 0") == 3
    for command, expected in pairs:
        assert call(*command.split()) == 0
        assert capsys.readouterr().out == expected
    for name, bubble, live in re.findall(r"^\| (`.*) \| (.*)% \| ([\d. ]*) \|$", page, re.MULTILINE):
        schedule, _, vpp = name.replace("`", "").partition(", --vpp ")
        assert call("schedule", "--schedule", schedule, "--vpp", vpp or 1) == 0
        said = f"bubble {bubble}%, live micro-batches by rank: {live}\n"
        assert capsys.readouterr().out.endswith(said)
    timeline = simulate(with_transfers(one_f_one_b(4, 8)))
    picture = (concepts / "pictures" / "pipeline-schedules.svg").read_text()
    boxes = re.findall(r'<rect x="(\d+)" y="(\d+)" width="(\d+)".*stroke.*\n<text .*>([FB]\d+)<', picture)
    expected = []
    for rank, row in enumerate(timeline.schedule):
        for action in (action for action in row if action.kind in PASSES):
            start, end = timeline.spans[action]
            expected.append((f"{64 + 20 * start:g}", f"{44 + 38 * rank}", f"{20 * (end - start):g}", str(action)))
    assert boxes == expected


def test_the_figures_of_the_page() -> None:
    page = (ROOT / "docs" / "concepts" / "pipeline-schedules.md").read_text()
    assert simulate(with_transfers(one_f_one_b(4, 32))).bubble_share == pytest.approx(3 / 35)
    assert "3 / 35 or 8.6%" in page
    won = re.findall(r"^\| `(.*?)`(?:, `--vpp (\d)`)?, (\d) ranks \| (.*)% \| (.*)% \|$", page, re.MULTILINE)
    assert len(won) == 5
    for name, virtual, num_ranks, *percents in won:
        schedule = SCHEDULES[name](int(num_ranks), 16, int(virtual or 1))
        slow = costs(schedule, transfer=0.05 / int(virtual or 1))
        ideal = simulate(schedule).duration
        for ahead, percent in zip((0, None), percents, strict=True):
            over = simulate(with_transfers(schedule, ahead), slow).duration / ideal - 1
            assert float(percent) == pytest.approx(100 * over, abs=0.005), (name, ahead)
    rows = with_transfers(one_f_one_b(2, 2))
    first, second = rows[1].index(Action("F", 1, 0)), rows[1].index(Action("B", 1, 0))
    rows[1][first], rows[1][second] = rows[1][second], rows[1][first]
    with pytest.raises(UserError) as caught:
        simulate(rows)
    assert caught.value.message.partition(": ")[2] in " ".join(page.split())
