"""`trainer train --dry-run`: everything that can be known before a run is checked and printed, and nothing is done."""

import re
from pathlib import Path

import pytest

from tests.trainer.support.training import call

Capture = pytest.CaptureFixture[str]


def test_a_run_is_described_and_nothing_is_written(
    job_config: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["--dry-run", "--save", "run", "--metrics", "m.jsonl", "--tp", 2, "--pp", 3, "--dp", 2]
    assert call("train", job_config, *flags) == 0
    text = capsys.readouterr().err
    assert "model    27,168 parameters: 3 layers of 32" in text
    assert "layout   tp 2 x pp 3 x dp 2 = 12 ranks, ZeRO stage 1, sequence parallel\n" in text
    assert "save     run every 600 s" in text
    assert [line.split()[:5] for line in text.splitlines() if line.startswith("memory")] == [
        ["memory", "a", "rank", "of", "stage"]
    ] * 3
    assert text.endswith("dry run  nothing was started or written\n")
    assert not list(tmp_path.iterdir())


def test_the_bubble_is_that_of_the_stages_arithmetic(job_config: Path, capsys: Capture) -> None:
    flags = ["--dry-run", "--pp", 2, "--model.vocab-size", 5000, "--model.num-layers", 10]
    shares = []
    for how in ("even", "cost", "7,3"):
        assert call("train", job_config, *flags, "--pipeline-layout", how) == 0
        printed = " ".join(capsys.readouterr().err.split())
        match = re.search(
            r"bubble ([0-9.]+)% of a step by the arithmetic of ([0-9 +]+) layers and the head, 11.1%", printed
        )
        assert match is not None, printed
        assert sum(map(int, match[2].split(" + "))) == 10
        assert how == "cost" or match[2] == {"even": "5 + 5", "7,3": "7 + 3"}[how]
        assert how == "even" or f"pp 2 ({match[2]} layers)" in printed
        shares.append(float(match[1]))
    even, cost, by_hand = shares
    assert cost < min(even, by_hand)


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        (["--tp", 3], "is not a multiple of parallel.tp 3"),
        (["--data.stores", "none"], "none"),
        (["--global-batch-size", 3, "--dp", 2], "is not a multiple of micro_batch_size"),
    ],
)
def test_what_would_end_the_run_ends_the_dry_run(job_config: Path, capsys: Capture, flags: list, fault: str) -> None:
    assert call("train", job_config, "--dry-run", *flags) == 2
    captured = capsys.readouterr()
    assert fault in captured.err
    assert "hint: " in captured.err


@pytest.mark.parametrize(("micro", "batch"), [(16, 16), (4, 6), (2, 3), (1, 3), (12, 18)])
def test_a_batch_that_does_not_fit_the_ranks_is_led_to_one_that_does(
    job_config: Path, capsys: Capture, micro: int, batch: int
) -> None:
    command = ["train", job_config, "--dry-run", "--dp", 2, "--micro-batch-size", micro, "--global-batch-size", batch]
    assert call(*command) == 2
    way = re.search(r"dp 2: (--(?:micro|global)-batch-size) (\d+)$", capsys.readouterr().err, re.MULTILINE)
    assert way is not None
    assert call(*command, way[1], way[2]) == 0


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--dp", 1], "ZeRO stage 3 (cuts nothing: dp is 1)"),
        (["--dp", 2], "ZeRO stage 3\n"),
        (["--dp", 2, "--dp-shard", "auto"], "ZeRO stage 3\n"),
        (["--dp", 2, "--dp-shard", 2], "ZeRO stage 3\n"),
        (["--dp", 4, "--dp-shard", 2], "ZeRO stage 3 in 2 groups of 2 along dp\n"),
        (["--dp", 4, "--dp-shard", 1], "ZeRO stage 3 (cuts what stage 1 does: dp_shard is 1)"),
    ],
)
def test_what_a_stage_cuts(job_config: Path, capsys: Capture, flags: list[object], says: str) -> None:
    assert call("train", job_config, "--dry-run", "--zero-stage", 3, *flags) == 0
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(("dp", "shard", "way"), [(4, 3, 2), (4, 9, 4), (3, 2, 1)])
def test_shard_groups_that_do_not_divide_dp(job_config: Path, capsys: Capture, dp: int, shard: int, way: int) -> None:
    command = ["train", job_config, "--dry-run", "--zero-stage", 3, "--dp", dp, "--global-batch-size", 4 * dp]
    assert call(*command, "--dp-shard", shard) == 2
    text = f"parallel.dp_shard {shard} does not divide the {dp} ranks of dp: --dp-shard {way}\n"
    assert text in capsys.readouterr().err
    assert call(*command, "--dp-shard", way) == 0
