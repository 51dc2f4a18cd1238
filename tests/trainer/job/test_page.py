"""A rank's page says where it is, to any process of its host, whatever becomes of the rank."""

import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.job.page import RankPage
from trainer.job.sight import NUM_RECORDS, RECORD, RING, label_of, members_of, parse, read_page


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RankPage:
    monkeypatch.setenv("TRAINER_PAGES", str(tmp_path))
    return RankPage(3, 8)


def test_the_newest_record_is_where_the_rank_is(page: RankPage) -> None:
    calls = page.group("dp", [1, 3, 5, 7])
    page.note(12, "trains")
    page.act("B", 2, 5)
    number = calls.begin("reduce_scatter")
    calls.wait("reduce_scatter", number)
    sight = read_page(page.path)
    assert sight is not None
    assert (sight.rank, sight.world_size, sight.pid, sight.end) == (3, 8, os.getpid(), "runs")
    assert sight.now.action == "B of stage 2, micro-batch 5"
    assert (sight.now.step, sight.now.phase, sight.now.waits) == (12, "trains", True)
    assert sight.now.collective == "reduce_scatter #1 of group dp, ranks 1-7/2"
    assert sight.counts == {"dp, ranks 1-7/2": 1}
    calls.end()
    assert page.sight().now.collective == ""


def test_the_ring_keeps_the_last_records_in_their_order(page: RankPage) -> None:
    for number in range(3 * NUM_RECORDS):
        page.act("F", 0, number)
    records = page.sight().records
    assert len(records) == NUM_RECORDS
    assert [after.number - before.number for before, after in pairwise(records)] == [1] * (NUM_RECORDS - 1)
    assert records[-1].microbatch == 3 * NUM_RECORDS - 1


@given(cut=st.integers(1, RECORD.size - 1))
def test_a_record_that_is_half_written_is_left_out(cut: int) -> None:
    page = RankPage(0, 1)
    try:
        for microbatch in range(NUM_RECORDS + 4):
            page.act("F", 0, microbatch)
        before = bytes(page._buffer)
        page.act("B", 1, 9)
        after, place = bytes(page._buffer), RING + RECORD.size * (page.number % NUM_RECORDS)
        half = before[:place] + after[place : place + cut] + before[place + cut :]
        sight = parse(half)
        assert sight is not None
        whole = half[place : place + RECORD.size] == after[place : place + RECORD.size]
        assert sight.now.number == page.number - (not whole)
    finally:
        page.close()


def test_what_is_not_a_page_is_none(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(bytes(100))
    assert read_page(tmp_path / "other") is None
    assert read_page(tmp_path / "absent") is None


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=40, unique=True).map(sorted))
def test_a_label_names_its_ranks(ranks: list[int]) -> None:
    assert members_of(label_of("tp.dp", ranks)) == tuple(ranks)


def test_the_label_of_a_large_group_is_short() -> None:
    assert label_of("world", range(4096)) == "world, ranks 0-4095"
    assert label_of("dp", range(3, 4096, 8)) == "dp, ranks 3-4091/8"


PROGRAM = """
import os, signal
from trainer.job.page import RankPage
page = RankPage(1, 2)
page.note(7, "saves")
print(page.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_page_of_a_killed_process_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_PAGES", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    sight = read_page(done.stdout.strip())
    assert sight is not None
    assert (sight.now.step, sight.now.phase, sight.end) == (7, "saves", "runs")


def test_a_page_without_a_place_for_it_is_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    page = RankPage(0, 1)
    assert page.path == ""
    page.note(1, "trains")
    assert page.sight().now.step == 1


def test_the_first_call_that_a_gpu_has_not_finished_is_named() -> None:
    class Mark:
        is_past = False

    page = RankPage(0, 2, on_gpu=True)
    calls, marks = page.group("tp", [0, 1]), [Mark() for _ in range(3)]
    for mark in marks:
        calls.end("all_gather", calls.begin("all_gather"), mark)
    page.mark(last := Mark(), "B", 1, 3)
    marks[0].is_past = True
    assert page.first_pending() == "the end of all_gather #2 of group tp, ranks 0, 1"
    marks[1].is_past = marks[2].is_past = True
    assert page.first_pending() == "the end of B of stage 1, micro-batch 3"
    last.is_past = True
    assert page.first_pending() == ""
    assert page.num_past == 4
    page.close()
