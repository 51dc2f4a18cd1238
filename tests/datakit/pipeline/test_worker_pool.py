"""WorkerPool: workers are the parent's to end, whatever comes from the terminal."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from datakit.pipeline import worker_pool
from datakit.pipeline.worker_pool import WorkerPool


@contextmanager
def pipe() -> Iterator[int]:
    ends = os.pipe()
    yield ends[1]
    for end in ends:
        os.close(end)


def test_a_ctrl_c_while_a_worker_starts_is_the_parents_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, started = worker_pool.subprocess.Popen, []

    def begin_and_interrupt(*arguments: object, **options: object) -> object:
        process = begin(*arguments, **options)  # type: ignore[call-overload]
        process.send_signal(signal.SIGINT)  # it has not come to its first line yet
        started.append(process)
        return process

    monkeypatch.setattr(worker_pool.subprocess, "Popen", begin_and_interrupt)
    timed_out = pytest.raises(worker_pool.subprocess.TimeoutExpired)
    with pipe() as keep_open, WorkerPool(1, keep_open=keep_open), timed_out:
        started[0].wait(1.0)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, set())
