"""StopRequest: what asks a run to save and end: a signal, or its time; a second SIGINT or SIGTERM ends it at once."""

import os
import signal
import sys
import time
from collections.abc import Callable

from threefold.cli import SAME_WITHIN_S
from threefold.errors import UserError
from trainer.job.passed_signals import ASKING, HeardSignals

ENDING = (signal.SIGINT, signal.SIGTERM)  # the second of these ends the process
OUT_OF_TIME = 256  # beside the numbers of signals, and above them, so that the ranks' maximum is one of them
EXIT_OUT_OF_TIME = 124  # as of timeout(1)


class StopRequest:
    """Note the first signal inside a `with`, instead of dying of it; `number` is that signal's, 0 before it.

    A thread of its own hears them, as the main thread may wait in a collective. It calls `at_term` at SIGTERM, which a
    launcher sends to the ranks that are left of a job: it may end the process.
    """

    def __init__(self, *, speaks: bool, max_time_s: float = 0.0, same_within_s: float = SAME_WITHIN_S) -> None:
        """Prepare; `speaks` on the one rank that reports the signal. `number` is OUT_OF_TIME after `max_time_s`.

        What follows a signal within `same_within_s` is its echo.
        """
        if not max_time_s >= 0:  # so put that a NaN is refused too
            raise UserError(f"train.max_time_s is {max_time_s}, not 0 or more", hint="--train.max-time-s 3600")
        self._speaks, self._same_within_s, self._signal = speaks, same_within_s, 0
        self.at_term: Callable[[], object] = lambda: None
        self._first_s = 0.0  # when the first of ENDING came
        self._ends_at_s = time.monotonic() + max_time_s if max_time_s else float("inf")

    @property
    def number(self) -> int:
        """What asks this rank to end: a signal's number, or OUT_OF_TIME; 0 if nothing does."""
        return self._signal or (OUT_OF_TIME if time.monotonic() >= self._ends_at_s else 0)

    def __enter__(self) -> "StopRequest":
        self._heard = HeardSignals((*ENDING, *ASKING), self._hear).__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._heard.__exit__()

    def _hear(self, number: int) -> None:
        if number == signal.SIGTERM:
            self.at_term()
        if not self._signal:
            self._signal = number
            self._say(number, "ends after this step; a second SIGINT or SIGTERM ends it at once")
        if number not in ENDING:
            return
        if not self._first_s:
            self._first_s = time.monotonic()
        elif time.monotonic() - self._first_s >= self._same_within_s:
            self._say(number, "ends at once; a save that is copied already is finished")
            os._exit(exit_code(number))

    def _say(self, number: int, what: str) -> None:
        if self._speaks:
            print(f"{cause_of(number)}: the run {what}", file=sys.stderr, flush=True)


def cause_of(number: int) -> str:
    """Return the name of what ended a run: a signal's, or the setting's that bounds its time."""
    return "train.max_time_s" if number == OUT_OF_TIME else signal.Signals(number).name


def exit_code(number: int) -> int:
    """Return the exit code of a process that a signal or its time ended, as shells and `timeout` count."""
    return EXIT_OUT_OF_TIME if number == OUT_OF_TIME else 128 + number
