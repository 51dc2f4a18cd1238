"""A commit is exclusive: of rival jobs that save one step one wins. Of a job that loses a rank no half remains."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckptkit.format.keys import ROOT_KEY, step_folder
from ckptkit.loading.roots import read_root
from ckptkit.model.layout import ParallelLayout
from ckptkit.runs.catalogue import committed_steps
from ckptkit.saving.checkpointer import Checkpointer, CheckpointerOptions, SaveReport
from tests.ckptkit.support.saves import (
    ROOT,
    SMALL,
    Injection,
    assert_holds,
    is_running,
    newest_good,
    save_one,
    save_whole,
    start_rank,
    strace,
    wait_until,
)
from threefold.storage import open_storage
from tools.fault_proxy import Fault, FaultProxy

HALVES = ParallelLayout(dp=2)


@pytest.fixture(params=["local", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "run") if request.param == "local" else request.getfixturevalue("s3_url")


def attempts_of(url: str, step: int) -> set[str]:
    """The attempts that have files in a step's folder."""
    keys = (item.key.split("/")[1] for item in open_storage(url).list(f"{step_folder(step)}/"))
    return {name for name in keys if name != ROOT_KEY}


def save_halves(url: str, step: int, attempt: str, deadline_s: float = 60.0) -> list[SaveReport]:
    """Save a step as two ranks of one job, step times the values."""
    options = CheckpointerOptions(deadline_s)
    ranks = [Checkpointer(url, rank=rank, world_size=2, attempt=attempt, options=options) for rank in (0, 1)]
    for rank, checkpointer in enumerate(ranks):
        save_one(checkpointer, step, SMALL, HALVES, rank, scale=step)
    return [checkpointer.close()[0] for checkpointer in ranks]


@pytest.mark.parametrize("num_races", [3, pytest.param(100, marks=pytest.mark.slow)])
def test_of_two_jobs_that_save_one_step_one_wins(url: str, num_races: int) -> None:
    options = CheckpointerOptions(max_failed_saves=num_races)
    with (
        Checkpointer(url, attempt="a", options=options) as first,
        Checkpointer(url, attempt="b", options=options) as second,
    ):
        for step in range(1, num_races + 1):
            rivals = [(first, "a", 2), (second, "b", 3)]
            random.shuffle(rivals)
            for checkpointer, _, scale in rivals:
                save_one(checkpointer, step, SMALL, scale=scale)
            ended = [(checkpointer.wait()[0], name, scale) for checkpointer, name, scale in rivals]
            (winner,) = [(name, scale) for report, name, scale in ended if report.ok]
            (loser,) = [report for report, _, _ in ended if not report.ok]
            assert f"step {step} of {url}" in loser.error
            assert "committed" in loser.error
            assert_holds(url, step, SMALL, scale=winner[1])
            assert read_root(open_storage(url), step).attempt == f"{winner[0]}-{step:04d}"
            assert attempts_of(url, step) == {f"{winner[0]}-{step:04d}"}, "the loser's files are gone"


@pytest.mark.slow
def test_both_of_two_jobs_are_at_the_root_when_one_wins(tmp_path: Path) -> None:
    """Each has written all its files before either links its root."""
    url = str(tmp_path)
    with Checkpointer(url, attempt="a") as first, Checkpointer(url, attempt="b") as second:
        delay = "linkat:delay_enter=1000000"
        with Injection(first.writer_pid, delay), Injection(second.writer_pid, delay):
            save_one(first, 5, SMALL, scale=2)
            save_one(second, 5, SMALL, scale=3)
            reports = [checkpointer.wait()[0] for checkpointer in (first, second)]
    assert sorted(report.ok for report in reports) == [False, True]
    loser = next(report for report in reports if not report.ok)
    assert f"step 5 of {url} " in loser.error
    assert "committed" in loser.error
    assert_holds(url, 5, SMALL, scale=2 if reports[0].ok else 3)
    assert attempts_of(url, 5) == {"a-0001" if reports[0].ok else "b-0001"}


@pytest.mark.slow
def test_a_writer_of_a_dead_job_is_overtaken_on_s3(s3_proxy: FaultProxy, s3_url: str) -> None:
    """The trainer of the old job is dead, its writer stands in the middle of its files while the next job saves."""
    s3_proxy.fault = Fault("delay", method="PUT", target="old-0001", delay_s=1.5)
    trainer = start_rank(s3_url, "--steps", 5, "--attempt", "old", "--then", "kill")
    writer = int(trainer.stdout.readline().split()[1])
    wait_until(lambda: s3_proxy.num_faults > 0)
    _overtake(s3_url, writer)
    trainer.communicate(timeout=30)


@pytest.mark.slow
def test_a_writer_of_a_dead_job_is_overtaken_on_a_disk(tmp_path: Path) -> None:
    url, slow = str(tmp_path), strace("fsync:delay_enter=300000")
    trainer = start_rank(url, "--steps", 5, "--attempt", "old", "--then", "kill", under=slow)
    writer = int(trainer.stdout.readline().split()[1])
    wait_until((tmp_path / "step-000000005/old-0001").exists)
    _overtake(url, writer)
    trainer.communicate(timeout=30)


def _overtake(url: str, writer: int) -> None:
    """Stop a writer of attempt old that saves step 5, save that step from another job, and let the writer go on."""
    os.kill(writer, signal.SIGSTOP)
    assert save_whole(url, 5, SMALL, scale=2, attempt="new").ok
    assert attempts_of(url, 5) >= {"new-0001"}
    os.kill(writer, signal.SIGCONT)
    wait_until(lambda: not is_running(writer))
    assert_holds(url, 5, SMALL, scale=2)
    assert attempts_of(url, 5) == {"new-0001"}


@pytest.mark.slow
def test_a_writer_of_a_dead_job_overtakes_the_next_job(tmp_path: Path) -> None:
    url = str(tmp_path)
    with Checkpointer(url, attempt="new") as checkpointer:
        with Injection(checkpointer.writer_pid, "linkat:delay_enter=10000000"):  # its commit comes late
            save_one(checkpointer, 5, SMALL, scale=2)
            wait_until((tmp_path / "step-000000005/new-0001/part-00000.index").exists)
            trainer = start_rank(url, "--steps", 5, "--attempt", "old", "--then", "kill")
            trainer.communicate(timeout=60)
            wait_until(lambda: committed_steps(open_storage(url)) == [5])
            assert "was committed by another attempt first" in checkpointer.wait()[0].error
        save_one(checkpointer, 6, SMALL, scale=6)
        assert checkpointer.wait()[0].ok
        assert newest_good(url, SMALL) == 6
    assert_holds(url, 5, SMALL, scale=5)
    assert attempts_of(url, 5) == {"old-0001"}


@pytest.mark.slow
def test_a_job_whose_step_another_committed_meanwhile_gives_up_at_once(tmp_path: Path) -> None:
    """The first rank has begun when the other job commits, the second has not."""
    ranks = [Checkpointer(str(tmp_path), rank=rank, world_size=2, attempt="late") for rank in (0, 1)]
    save_one(ranks[0], 4, SMALL, HALVES, 0)
    wait_until(lambda: (tmp_path / "step-000000004/late-0001/part-00000.index").exists())
    assert save_whole(tmp_path, 4, SMALL, scale=4, attempt="early").ok
    save_one(ranks[1], 4, SMALL, HALVES, 1)
    errors = [checkpointer.close()[0].error for checkpointer in ranks]
    assert "is committed already" in errors[1]
    assert "writer 1 failed" in errors[0]
    assert newest_good(tmp_path, SMALL) == 4
    assert attempts_of(str(tmp_path), 4) == {"early-0001"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(14))
def test_a_rank_that_dies_in_a_save_leaves_no_half(tmp_path: Path, seed: int) -> None:
    """Its trainer and its writer are killed at a random moment; the other rank says who is missing."""
    url = str(tmp_path)
    assert all(report.ok for report in save_halves(url, 1, "a"))
    options = CheckpointerOptions(deadline_s=1.5)
    with Checkpointer(url, rank=0, world_size=2, attempt="program", options=options) as checkpointer:
        dying = start_rank(url, "--rank", 1, "--layout", "dp2", "--steps", 2, "--then", "hold")
        writer = int(dying.stdout.readline().split()[1])
        with Injection(writer, "fsync:delay_enter=20000"):
            save_one(checkpointer, 2, SMALL, HALVES, 0, scale=2)
            assert dying.stdout.readline() == "told\n"
            time.sleep(random.Random(seed).uniform(0.0, 0.2))
            os.kill(writer, signal.SIGKILL)
            dying.kill()
        dying.communicate(timeout=30)
        report = checkpointer.wait()[0]
    assert report.ok or "writer 1 of 2 was not done" in report.error
    assert report.ok or "part-00001.index is not there" in report.error
    assert committed_steps(open_storage(url)) == ([1, 2] if report.ok else [1])
    assert newest_good(url, SMALL) == (2 if report.ok else 1)
    again = save_halves(url, 2, "b")
    assert all(each.ok or (report.ok and "committed" in each.error) for each in again)
    assert newest_good(url, SMALL) == 2
    assert all(report.ok for report in save_halves(url, 3, "b"))
    assert newest_good(url, SMALL) == 3


@pytest.mark.slow
def test_all_trainers_of_a_job_die_in_a_save_and_it_is_committed(s3_proxy: FaultProxy, s3_url: str) -> None:
    """The whole process group is killed, as torchrun does it."""
    s3_proxy.fault = Fault("delay", method="PUT", delay_s=0.5)
    ranks: list[subprocess.Popen[str]] = []
    for rank in (0, 1):
        options = ("--rank", rank, "--layout", "dp2", "--steps", 7, "--then", "hold")
        ranks.append(start_rank(s3_url, *options, group=ranks[0].pid if ranks else 0))
    writers = [int(trainer.stdout.readline().split()[1]) for trainer in ranks]
    assert [trainer.stdout.readline() for trainer in ranks] == ["told\n"] * 2
    os.killpg(ranks[0].pid, signal.SIGKILL)
    for trainer in ranks:
        trainer.communicate(timeout=30)
    assert [trainer.returncode for trainer in ranks] == [-signal.SIGKILL] * 2
    assert committed_steps(open_storage(s3_url)) == []
    wait_until(lambda: not any(map(is_running, writers)))
    assert newest_good(s3_url, SMALL) == 7
    s3_proxy.fault = Fault()
    assert all(report.ok for report in save_halves(s3_url, 8, "b"))
    assert newest_good(s3_url, SMALL) == 8


SHORT_OF_MEMORY = """
import resource, sys
from ckptkit.saving.checkpointer import Checkpointer
from tests.ckptkit.support.model_tables import gpt_tensors, values
from tests.ckptkit.support.saves import NUM_LAYERS, ONE, SMALL, pieces_of, save_one
tensors = gpt_tensors(hidden=256, ffn=512, vocab=20000)
pieces = pieces_of(tensors, ONE, 0, values(tensors))
with Checkpointer(sys.argv[1], attempt="a") as checkpointer:
    save_one(checkpointer, 1, SMALL)
    assert checkpointer.wait()[0].ok
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), resource.RLIM_INFINITY))
    for step in (2, 3):
        checkpointer.save(step, pieces, tensors=tensors, layout=ONE, num_layers=NUM_LAYERS, metadata={"scale": 1})
        print(checkpointer.wait()[0].error or "saved")
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
"""


def test_a_trainer_without_memory_for_the_arena_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SHORT_OF_MEMORY, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.splitlines() == ["rank 0: no memory to stage step 2: Cannot allocate memory", "saved"], (
        done.stderr
    )
    assert committed_steps(open_storage(tmp_path)) == [1, 3]
