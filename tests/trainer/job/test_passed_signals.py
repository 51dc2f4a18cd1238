"""Signals of a launcher are its ranks': these end in their own time, and its wait for them ends with a fault."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from trainer.job import passed_signals
from trainer.job.passed_signals import ASKING, ENDING, PassedSignals, all_end_well, ranks_here

RANK = """
import signal, sys, time
code = int(sys.argv[1])
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
    signal.signal(number, lambda number, _: (print(signal.Signals(number).name, flush=True), sys.exit(code)))
print("ready", flush=True)
time.sleep(60)
"""
Started = Callable[[int], "subprocess.Popen[str]"]


@pytest.fixture(autouse=True)
def others(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What other tests of this process have started, such as a server, is no rank, and lives on."""
    server = subprocess.Popen(["sleep", "60"], start_new_session=True)
    before = {*ranks_here()}
    monkeypatch.setattr(passed_signals, "ranks_here", lambda: [rank for rank in ranks_here() if rank not in before])
    yield
    assert server.poll() is None
    server.kill()
    server.wait()


@pytest.fixture
def start() -> Iterator[Started]:
    """Start a process as torch's launcher starts a rank; it ends with a code at any signal."""
    started: list[subprocess.Popen[str]] = []

    def start_one(code: int) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-c", RANK, str(code)], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield start_one
    for process in started:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()


def lines_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_only_what_leads_a_session_is_a_rank(start: Started) -> None:
    before = ranks_here()  # a server that another test started
    other = subprocess.Popen(["sleep", "60"])
    try:
        rank = start(0)
        assert {*ranks_here()} - {*before} == {rank.pid}
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize("number", [*ENDING, *ASKING])
def test_each_rank_gets_a_signal_and_ends_in_its_own_time(number: signal.Signals, start: Started) -> None:
    ranks = [start(0), start(0)]
    before = signal.getsignal(number)
    with PassedSignals() as signals:
        os.kill(os.getpid(), number)
        assert [lines_of(rank) for rank in ranks] == [number.name] * 2
        assert [rank.wait(60) for rank in ranks] == [0, 0]  # their codes are left to who started them
        assert signals.ended_by == (number if number in ENDING else 0)
    assert signal.getsignal(number) is before


def test_a_rank_that_fails_after_a_signal_ends_the_wait(start: Started) -> None:
    from torch.distributed.elastic.multiprocessing import SignalException

    failing = start(5)
    with pytest.raises(SignalException) as raised, PassedSignals():
        os.kill(os.getpid(), signal.SIGTERM)
    assert raised.value.sigval == signal.SIGTERM
    assert failing.wait(60) == 5


def test_without_ranks_a_signal_ends_the_launcher() -> None:
    from torch.distributed.elastic.multiprocessing import SignalException

    with pytest.raises(SignalException) as raised, PassedSignals():
        os.kill(os.getpid(), signal.SIGUSR1)
    assert raised.value.sigval == signal.SIGUSR1


def test_a_second_signal_reaches_ranks_that_the_first_one_waits_for(start: Started) -> None:
    stubborn = subprocess.Popen(
        [sys.executable, "-c", RANK.replace("sys.exit(code)", "None"), "0"], stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    heard: list[str] = []

    def send_again() -> None:
        for _ in range(2):
            heard.append(lines_of(stubborn))
            os.kill(os.getpid(), signal.SIGTERM)
        heard.append(lines_of(stubborn))
        stubborn.kill()

    sender = threading.Thread(target=send_again)

    def wait() -> None:
        with PassedSignals():
            sender.start()
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)

    try:
        assert lines_of(stubborn) == "ready"
        from torch.distributed.elastic.multiprocessing import SignalException

        with pytest.raises(SignalException):
            wait()
        sender.join(60)
    finally:
        stubborn.kill()
        stubborn.wait()
    assert heard == ["SIGTERM"] * 3


def test_a_hangup_that_nohup_ignores_is_passed_to_nobody(start: Started) -> None:
    rank = start(0)
    usual = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with PassedSignals():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, usual)
    assert rank.poll() is None


def test_a_rank_whose_code_was_read_already_has_ended(start: Started) -> None:
    rank = start(0)
    rank.kill()
    rank.wait()
    assert all_end_well([rank.pid])
