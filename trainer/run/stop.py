"""StopRequest: what asks a run to save and end: a signal, or its time; a second SIGINT or SIGTERM ends it at once."""

import os
import signal
import sys
import threading
import time
from types import FrameType

from threefold.cli import SAME_WITHIN_S

ENDING = (signal.SIGINT, signal.SIGTERM)  # the second of these ends the process
ASKING = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)  # what schedulers send ahead, and terminals that close
OUT_OF_TIME = 256  # beside the numbers of signals, and above them, so that the ranks' maximum is one of them
EXIT_OUT_OF_TIME = 124  # as of timeout(1)


class StopRequest:
    """Note the first signal inside a `with`, instead of dying of it; `number` is that signal's, 0 before it.

    A thread of its own reads signals from a pipe that Python's C handler fills. The main thread may wait in a
    collective, where no handler written in Python runs. A SIGHUP that was ignored at the start stays so: nohup.
    """

    def __init__(self, *, speaks: bool, max_time_s: float = 0.0) -> None:
        """Prepare; `speaks` on the one rank that reports the signal. `number` is OUT_OF_TIME after `max_time_s`."""
        self._speaks, self._signal = speaks, 0
        self._ends_at_s = time.monotonic() + max_time_s if max_time_s else float("inf")

    @property
    def number(self) -> int:
        """What asks this rank to end: a signal's number, or OUT_OF_TIME; 0 if nothing does."""
        return self._signal or (OUT_OF_TIME if time.monotonic() >= self._ends_at_s else 0)

    def __enter__(self) -> "StopRequest":
        is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._heard = [number for number in (*ENDING, *ASKING) if number != signal.SIGHUP or not is_ignored]
        self._usual = {number: signal.signal(number, _leave_to_thread) for number in self._heard}
        self._received, self._sent = os.pipe()
        os.set_blocking(self._sent, False)
        self._usual_fd = signal.set_wakeup_fd(self._sent, warn_on_full_buffer=False)
        self._listener = threading.Thread(target=self._listen, name="stop-request", daemon=True)
        self._listener.start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._usual_fd)
        for number, usual in self._usual.items():
            signal.signal(number, usual)
        os.close(self._sent)
        self._listener.join()
        os.close(self._received)

    def _listen(self) -> None:
        first_s = 0.0  # when the first of ENDING came
        while numbers := os.read(self._received, 1):  # empty once the other end is closed
            [number] = numbers
            if number not in self._heard:
                continue
            if not self._signal:
                self._signal = number
                self._say(number, "ends after this step; a second SIGINT or SIGTERM ends it at once")
            if number not in ENDING:
                continue
            if not first_s:
                first_s = time.monotonic()
            elif time.monotonic() - first_s >= SAME_WITHIN_S:
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


def _leave_to_thread(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: a handler of Python's has to be there for its C handler to fill the pipe."""
