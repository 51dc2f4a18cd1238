"""One signal asks a run to end well, a second one ends the process wherever it waits."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ckptkit.runs.catalogue import committed_steps
from tests.trainer.support.training import ROOT, call, last_step
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_first_signal_is_noted_and_its_echo_is_no_second(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stop, "SAME_WITHIN_S", 60.0)
    before = [signal.getsignal(each) for each in stop.STOPPING]
    with StopRequest(speaks=True) as request:
        for _ in range(2):
            os.kill(os.getpid(), number)
        wait_until(lambda: request.number == number)
    assert [signal.getsignal(each) for each in stop.STOPPING] == before
    assert capsys.readouterr().err == f"{number.name}: the run ends after this step; a second one ends it at once\n"


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
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


def wait_until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
