"""Retries: trying again, after longer and longer pauses, what failed for a cause that may pass."""

import time
from collections.abc import Callable
from typing import TypeVar

from threefold.backoff import Backoff
from threefold.storage import TemporaryFailure

FIRST_PAUSE_S, MAX_PAUSE_S = 0.2, 15.0
T = TypeVar("T")


class Retries:
    """For each piece of work that is run: tries for so many seconds after its first failure; `num_attempts` counts.

    `check` may raise before a try that is of no use any more, and `sleep` return early for the same cause.
    """

    def __init__(
        self,
        for_s: float = 0.0,
        check: Callable[[], None] = lambda: None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.num_attempts = 1
        self._for_s, self._check, self._sleep = for_s, check, sleep

    def run(self, work: Callable[[], T], *, checks: bool = True) -> T:
        """Return what `work` returns, or raise the last TemporaryFailure; any other failure at once.

        Without `checks` it goes on though it is of no use any more.
        """
        backoff: Backoff | None = None
        while True:
            if checks:
                self._check()
            try:
                return work()
            except TemporaryFailure:
                backoff = backoff or Backoff(FIRST_PAUSE_S, MAX_PAUSE_S, within_s=self._for_s)
                if (pause_s := backoff.next_s()) is None:
                    raise
            self.num_attempts += 1
            (self._sleep if checks else time.sleep)(pause_s)

    def pause(self, seconds: float) -> None:
        """Wait between two looks, unless what is waited for is of no use any more."""
        self._check()
        self._sleep(seconds)
        self._check()
