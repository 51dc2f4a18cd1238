"""One signal asks a run to end well, a second one ends the process wherever it waits."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from ckptkit.runs.catalogue import committed_steps
from tests.trainer.support.training import ROOT, Job, call, last_step
from threefold.errors import UserError
from threefold.storage import open_storage
from trainer.run import stop
from trainer.run.stop import StopRequest

# waits where signals wake no Python code, as a collective does
WAITING = """
import ctypes, signal, sys, time
from trainer.run.stop import StopRequest
lock, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
with StopRequest(speaks=True):
    print("ready", flush=True)
    libc.pthread_mutex_lock(lock)
    libc.pthread_mutex_lock(lock)
"""


ALL = [*stop.ENDING, *stop.ASKING]


@pytest.mark.parametrize("number", ALL)
def test_a_first_signal_is_noted_and_its_echo_is_no_second(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [signal.getsignal(each) for each in ALL]
    with StopRequest(speaks=True, same_within_s=60.0) as request:
        for _ in range(2):
            os.kill(os.getpid(), number)
        wait_until(lambda: request.number == number)
    assert [signal.getsignal(each) for each in ALL] == before
    said = f"{number.name}: the run ends after this step; a second SIGINT or SIGTERM ends it at once\n"
    assert capsys.readouterr().err == said


def test_a_rank_may_leave_at_sigterm_alone() -> None:
    calls = list[str]()
    with StopRequest(speaks=False, same_within_s=60.0) as request:
        request.at_term = lambda: calls.append("SIGTERM")
        for number in (signal.SIGUSR1, signal.SIGTERM):
            os.kill(os.getpid(), number)
        wait_until(lambda: calls)
        assert (request.number, calls) == (signal.SIGUSR1, ["SIGTERM"])


def test_a_hangup_that_nohup_ignores_asks_for_nothing() -> None:
    usual = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest(speaks=True) as request:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            os.kill(os.getpid(), signal.SIGUSR1)
            wait_until(lambda: request.number)
            assert request.number == signal.SIGUSR1
    finally:
        signal.signal(signal.SIGHUP, usual)


def test_what_a_scheduler_sends_ahead_is_no_first_of_two(capsys: pytest.CaptureFixture[str]) -> None:
    with StopRequest(speaks=True, same_within_s=0.0) as request:
        for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM):
            os.kill(os.getpid(), number)
            time.sleep(0.05)  # a process that ends at once ends the test run
        assert request.number == signal.SIGUSR1
    assert "at once;" not in capsys.readouterr().err


def test_time_that_is_over_asks_for_an_end_and_a_signal_goes_first() -> None:
    with StopRequest(speaks=False, max_time_s=1e-3) as request:
        wait_until(lambda: request.number == stop.OUT_OF_TIME)
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: request.number == signal.SIGTERM)
    assert not StopRequest(speaks=False).number
    assert not StopRequest(speaks=False, max_time_s=3600).number


@pytest.mark.parametrize("seconds", [float("nan"), -1.0])
def test_a_time_that_is_no_time_is_refused(seconds: float) -> None:
    with pytest.raises(UserError, match=r"train\.max_time_s is"):
        StopRequest(speaks=False, max_time_s=seconds)


def test_a_second_signal_ends_a_process_that_waits_in_a_library() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline().startswith("SIGINT: the run ends after this step")
    time.sleep(stop.SAME_WITHIN_S * 1.5)
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=60)
    assert process.returncode == 130
    assert rest.startswith("SIGINT: the run ends at once")


@pytest.mark.parametrize("number", ALL)
def test_a_stopped_run_is_saved_and_does_not_pass_for_a_complete_one(
    number: signal.Signals, job_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def send() -> None:
        wait_until(lambda: last_step(tmp_path / "m.jsonl") >= 2)
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    flags = ["--save", tmp_path / "run", "--train-steps", 100000, "--metrics", tmp_path / "m.jsonl"]
    assert call("train", job_config, *flags) == 128 + number
    sender.join()
    last = last_step(tmp_path / "m.jsonl")
    assert f"stopped by {number.name} after step {last}" in capsys.readouterr().err
    assert committed_steps(open_storage(tmp_path / "run")) == [last]


@pytest.mark.parametrize("flags", [("--train.max-time-s", "1e-6"), ("--exit-duration-in-mins", "1e-6")])
def test_a_run_whose_time_is_over_is_saved_and_goes_on_later(
    flags: tuple[str, str], job_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = ["train", job_config, "--save", tmp_path / "run", "--metrics", tmp_path / "m.jsonl"]
    assert call(*usual, *flags) == stop.EXIT_OUT_OF_TIME
    assert "stopped by train.max_time_s after step 1" in capsys.readouterr().err
    assert committed_steps(open_storage(tmp_path / "run")) == [1]
    assert call(*usual) == 0
    assert "resumed from step 1 of" in capsys.readouterr().err
    assert last_step(tmp_path / "m.jsonl") == 12


def signal_one_rank(job: Job, number: int) -> tuple[int, str]:
    process = job.start()
    while last_step(job.metrics) < 2 and process.poll() is None:
        time.sleep(0.01)
    ranks = {int(child.environ()["RANK"]): child for child in psutil.Process(process.pid).children()}
    ranks[1].send_signal(number)
    return job.outcome(process)


@pytest.mark.slow
@pytest.mark.parametrize("number", ALL)
def test_a_rank_that_torchrun_started_and_a_signal_ended_ends_with_0(
    number: signal.Signals, job_config: Path, tmp_path: Path
) -> None:
    arguments = [job_config, "--train-steps", 100000, "--save", tmp_path / "run"]
    code, output = signal_one_rank(Job(2, *arguments, metrics=tmp_path / "m.jsonl"), number)
    last = last_step(tmp_path / "m.jsonl")
    assert (code, f"stopped by {number.name} after step {last}" in output) == (0, True), output
    assert committed_steps(open_storage(tmp_path / "run")) == [last]


@pytest.mark.ci
@pytest.mark.slow
def test_ranks_that_torchrun_started_and_their_time_ended_end_with_0(job_config: Path, tmp_path: Path) -> None:
    arguments = [job_config, "--train-steps", 100000, "--save", tmp_path / "run", "--train.max-time-s", 1e-6]
    assert "stopped by train.max_time_s after step 1" in Job(2, *arguments, metrics=tmp_path / "m.jsonl").run()
    assert committed_steps(open_storage(tmp_path / "run")) == [1]


def wait_until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
