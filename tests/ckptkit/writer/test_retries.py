"""Trying again what may pass: each piece of work for so long, and not for what is no longer wanted."""

import threading
import time

import pytest

from ckptkit.writer import retries as retries_module
from ckptkit.writer.retries import Retries
from threefold.errors import StorageError
from threefold.storage import TemporaryFailure


class Failing:
    """Work that fails so many times."""

    def __init__(self, times: int, failure: Exception | None = None) -> None:
        self.left, self.failure = times, failure or TemporaryFailure("busy")

    def __call__(self) -> str:
        self.left -= 1
        if self.left >= 0:
            raise self.failure
        return "done"


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses, in a time that passes by them alone."""
    pauses: list[float] = []
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0 + sum(pauses))
    return pauses


def test_pauses_grow_within_the_time(slept: list[float]) -> None:
    retries = Retries(60.0, sleep=slept.append)
    assert retries.run(Failing(4)) == "done"
    assert (slept, retries.num_attempts) == ([0.2, 0.4, 0.8, 1.6], 5)
    with pytest.raises(TemporaryFailure, match="busy"):
        retries.run(Failing(100))
    assert sum(slept[4:]) < 60.0
    assert max(slept) == retries_module.MAX_PAUSE_S


def test_each_piece_of_work_has_its_own_time(slept: list[float]) -> None:
    retries = Retries(1.0, sleep=slept.append)
    for _ in range(5):
        assert retries.run(Failing(2)) == "done"
    assert retries.num_attempts == 11


def test_what_no_pause_mends_fails_at_once(slept: list[float]) -> None:
    with pytest.raises(StorageError, match="no such bucket"):
        Retries(60.0, sleep=slept.append).run(Failing(1, StorageError("no such bucket")))
    with pytest.raises(TemporaryFailure):
        Retries(sleep=slept.append).run(Failing(1))
    assert slept == []


def test_what_is_given_up_ends_its_pause_and_gets_no_other_try() -> None:
    given_up = threading.Event()

    def check() -> None:
        if given_up.is_set():
            raise StorageError("given up")

    def work() -> None:
        work.tries += 1
        given_up.set()
        raise TemporaryFailure("busy")

    work.tries = 0
    retries = Retries(3600.0, check, given_up.wait)
    with pytest.raises(StorageError, match="given up"):
        retries.run(work)
    assert work.tries == 1
    with pytest.raises(StorageError, match="given up"):
        retries.pause(3600.0)
    assert retries.run(Failing(1), checks=False) == "done"
