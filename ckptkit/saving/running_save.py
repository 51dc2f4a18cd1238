"""RunningSave: the one save that the writer works on, as the trainer sees it: the copies of its state, and its end.

While a thread copies, that thread alone listens to the writer, and keeps what it hears. Whatever the writer does, all
is over `timeout_s` after the begin.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ckptkit.format.keys import Seat
from ckptkit.handoff.protocol import SaveOutcome
from ckptkit.handoff.ring_signals import RingSignals, Signal
from ckptkit.saving.client import WriterProcess
from ckptkit.saving.staging import Staging

MOVES_WITHIN_S = 10.0  # no operation on a tensor takes so long
LOOK_EVERY_S = 0.001


def no_change() -> str:
    """Return that nothing changed, of state that its owner leaves alone until `join`."""
    return ""


class CallerThread:
    """The thread that makes this, as another one sees it that asks whether what it was just doing has ended."""

    def __init__(self) -> None:
        self._id = threading.get_ident()

    def await_move(self, is_waiting: threading.Event) -> None:
        """Wait until the thread is at another place of its program, or is known to wait.

        A write in place raises its version counter at its end. So one that is under way now is seen afterwards.
        """
        first, deadline = self._place(), time.monotonic() + MOVES_WITHIN_S
        while self._place() == first and time.monotonic() < deadline and not is_waiting.wait(LOOK_EVERY_S):
            pass

    def _place(self) -> tuple[object, int]:
        frame = sys._current_frames().get(self._id)
        return frame, frame.f_lasti if frame is not None else -1


class RunningSave:
    """One save, from its order to its outcome; `given_up` says why it is no longer wanted, if it is not.

    Of the trainer's process: its caller's thread, and with `overlap` the staging thread, which then alone listens.
    """

    def __init__(
        self, seat: Seat, data_bytes: int, writer: WriterProcess, signals: RingSignals, timeout_s: float
    ) -> None:
        self.seat, self.data_bytes = seat, data_bytes
        self.started, self.stall_s, self.given_up = time.monotonic(), 0.0, ""
        self._writer, self._signals = writer, signals
        self._deadline = self.started + timeout_s
        self._staging: Staging | None = None  # while a thread copies
        self._is_joined = threading.Event()
        self._outcome: SaveOutcome | EOFError | None = None

    @property
    def left_s(self) -> float:
        """Seconds until the writer has to be done."""
        return max(self._deadline - time.monotonic(), 0.0)

    def order(self, line: bytes) -> None:
        """Send the writer its order."""
        self._signals.reset()
        self._writer.send(line, self.left_s)

    def stage(self, staging: Staging) -> None:
        """Copy the state."""
        with self._given_up_on_failure():
            staging.run(self._room)

    def stage_beside(self, staging: Staging, change: Callable[[], str]) -> None:
        """Copy the state on a thread, until `join`; give the save up if `change` then names what was written to."""
        caller = CallerThread()

        def is_sound() -> bool:
            caller.await_move(self._is_joined)
            if changed := change():
                self.give_up(f"rank {self.seat.writer}: {changed}")
            return not changed

        with self._given_up_on_failure():
            staging.start(self._room, is_sound)
            self._staging = staging

    def join(self) -> float:
        """Wait until all is copied; return the seconds that took."""
        started = time.monotonic()
        self._is_joined.set()
        staging, self._staging = self._staging, None
        if staging is None:
            return 0.0
        with self._given_up_on_failure():
            staging.join()
        seconds = time.monotonic() - started
        self.stall_s += seconds
        return seconds

    def give_up(self, reason: str) -> None:
        """Let the writer know, as soon as it listens, that nobody wants this save any more."""
        self.given_up = reason
        self._signals.stop.add()

    def outcome(self, timeout_s: float) -> SaveOutcome | EOFError | None:
        """Return how it ended in the writer, or how the writer died; None if it runs on after so many seconds."""
        deadline = time.monotonic() + timeout_s
        if self._staging is not None:
            if timeout_s > 0:
                self._is_joined.set()
                self._staging.wait(timeout_s)
            if self._staging.is_running:
                return None
            self.join()
        if self._outcome is None:
            self._listen(max(deadline - time.monotonic(), 0.0))
        return self._outcome

    def _listen(self, timeout_s: float, *, unless: Signal | None = None) -> None:
        """Keep what the writer says of the save."""
        try:
            self._outcome = self._writer.receive(timeout_s, unless=unless)
        except EOFError as death:
            self._outcome = death

    def _room(self) -> int:
        """Wait until the writer released blocks, and return their number; 0 if it ended the save."""
        while self._outcome is None:
            if count := self._signals.released.take():
                return count
            if self.left_s <= 0:
                self._writer.kill()
            self._listen(self.left_s, unless=self._signals.released)
        return 0

    @contextmanager
    def _given_up_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._signals.stop.add()
            raise
