"""What a rank did last is in a file after each end that is not clean, whoever writes it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.job.flight import dead_of, default_folder, end_page, pages_of_node
from trainer.job.page import FOLDER, RankPage


def flight(folder: Path, rank: int) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / f"flight-rank-{rank:05}.jsonl").read_text().splitlines()]


def test_an_end_that_is_not_clean_leaves_the_last_records(tmp_path: Path) -> None:
    page = RankPage(2, 4)
    page.describe(folder=str(tmp_path / "flight"))
    page.note(5, "trains")
    page.act("F", 1, 3)
    path = end_page(page, "RuntimeError: a fault at s3://user:secret@host/run")
    head, *records = flight(tmp_path / "flight", 2)
    assert path == tmp_path / "flight" / "flight-rank-00002.jsonl"
    assert head["rank"] == 2
    assert "secret" not in str(head["why"])
    assert str(head["last"]).startswith("step 5, where it trains, F of stage 1, micro-batch 3, for ")
    assert [record["kind"] for record in records] == ["", "", "F"]
    assert not os.path.exists(page.path)


def test_a_clean_end_leaves_nothing(tmp_path: Path) -> None:
    page = RankPage(0, 1)
    page.describe(folder=str(tmp_path / "flight"))
    assert end_page(page, None) is None
    assert not (tmp_path / "flight").exists()


PROGRAM = """
import os, signal, sys
from trainer.job.flight import end_page
from trainer.job.page import RankPage
page = RankPage(int(sys.argv[1]), 3)
page.describe(folder=sys.argv[2])
page.note(7, "saves")
how = sys.argv[3]
os.kill(os.getpid(), signal.SIGKILL) if how == "dies" else end_page(page, how if how == "fails" else None)
"""


def test_the_launcher_writes_for_ranks_that_died(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pages_of_node():
        folder = Path(os.environ[FOLDER])
        for rank, how in enumerate(("dies", "fails", "ends")):
            command = [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path), how]
            subprocess.run(command, check=False, env=os.environ | {FOLDER: str(folder)})
        assert [sight.rank for sight in dead_of(list(folder.iterdir()))] == [0]
    assert not folder.exists()
    assert FOLDER not in os.environ
    assert flight(tmp_path, 0)[0]["why"] == "it ended without a word"
    assert flight(tmp_path, 1)[0]["why"] == "fails"
    assert not (tmp_path / "flight-rank-00002.jsonl").exists()
    assert capsys.readouterr().err.strip().endswith("flight-rank-00000.jsonl")


def test_reports_go_beside_the_metrics() -> None:
    assert default_folder("runs/a/metrics.jsonl") == Path("runs/a/flight")
    assert default_folder("").name == f"trainer-flight-{os.getppid()}"
