"""StopRequest: the first SIGINT or SIGTERM asks a run to save and end, the second one ends the process at once."""

import os
import signal
import sys
import threading
import time
from types import FrameType

from threefold.cli import SAME_WITHIN_S

STOPPING = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Note the first signal inside a `with`, instead of dying of it; `number` is that signal's, 0 before it.

    A thread of its own reads signals from a pipe that Python's C handler fills. The main thread may wait in a
    collective, where no handler written in Python runs.
    """

    number = 0

    def __init__(self, *, speaks: bool) -> None:
        """Prepare; `speaks` on the one rank that reports the signal."""
        self._speaks = speaks

    def __enter__(self) -> "StopRequest":
        self._usual = {number: signal.signal(number, _leave_to_thread) for number in STOPPING}
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
        first_s = 0.0
        while numbers := os.read(self._received, 1):  # empty once the other end is closed
            if numbers[0] not in STOPPING:
                continue
            if not self.number:
                self.number, first_s = numbers[0], time.monotonic()
                self._say("ends after this step; a second one ends it at once")
            elif time.monotonic() - first_s >= SAME_WITHIN_S:
                self._say("ends at once; a save that is copied already is finished")
                os._exit(exit_code(numbers[0]))

    def _say(self, what: str) -> None:
        if self._speaks:
            print(f"{signal.Signals(self.number).name}: the run {what}", file=sys.stderr, flush=True)


def exit_code(number: int) -> int:
    """Return the exit code of a process that ended for a signal, as shells count."""
    return 128 + number


def _leave_to_thread(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: a handler of Python's has to be there for its C handler to fill the pipe."""
