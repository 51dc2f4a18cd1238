"""Pauses between tries: they grow, have a bound, and end with the tries or the time that is allowed."""

import time

import pytest

from threefold.backoff import Backoff


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses that pass without waiting, once they are appended."""
    passed: list[float] = []
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0 + sum(passed))
    return passed


def all_pauses(backoff: Backoff, clock: list[float]) -> list[float]:
    while (pause_s := backoff.next_s()) is not None and len(clock) < 100:
        clock.append(pause_s)
    return clock


def test_pauses_double_up_to_their_bound(clock: list[float]) -> None:
    assert all_pauses(Backoff(0.5, 3.0, max_tries=6), clock) == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_no_pause_ends_after_the_deadline(clock: list[float]) -> None:
    backoff = Backoff(1.0, within_s=10.0)
    assert all_pauses(backoff, clock) == [1.0, 2.0, 4.0]
    assert backoff.num_tries == 4
    assert Backoff(1.0, within_s=0.5).next_s() is None


def test_one_try_has_no_pause() -> None:
    assert Backoff(1.0, max_tries=1).next_s() is None


def test_jitter_moves_each_pause_by_its_share_at_most() -> None:
    pauses = [Backoff(2.0, jitter=0.25).next_s() or 0.0 for _ in range(50)]
    assert 1.5 <= min(pauses) < max(pauses) <= 2.5


def test_a_pause_may_follow_the_time_that_looks_took() -> None:
    backoff = Backoff(0.02, 10.0, growth=1 / 8)
    assert [round(backoff.after(waited_s), 3) for waited_s in (0.0, 0.8, 8.0, 1000.0)] == [0.02, 0.12, 1.02, 10.0]
