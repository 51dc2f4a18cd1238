"""HeardSignals: a thread hears signals while the main thread waits in a library, where no handler of Python's runs."""

import os
import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType

ASKING = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)  # what schedulers send ahead, and terminals that close


def leave_to_thread(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: a handler of Python's has to be there for its C handler to fill the pipe."""


class HeardSignals:
    """Call `hear` with each signal's number on a thread inside a `with`; the pipe is filled by Python's C handler.

    `handler` is what the main thread does. A signal that was ignored at the start stays so: nohup.
    """

    def __init__(
        self,
        numbers: Iterable[signal.Signals],
        hear: Callable[[int], None],
        handler: Callable[[int, FrameType | None], None] = leave_to_thread,
    ) -> None:
        self._numbers, self._hear, self._handler = tuple(numbers), hear, handler

    def __enter__(self) -> "HeardSignals":
        heard = [number for number in self._numbers if signal.getsignal(number) is not signal.SIG_IGN]
        self._usual = {number: signal.signal(number, self._handler) for number in heard}
        self._received, self._sent = os.pipe()
        os.set_blocking(self._sent, False)
        self._usual_fd = signal.set_wakeup_fd(self._sent, warn_on_full_buffer=False)
        self._listener = threading.Thread(target=self._listen, name="heard-signals", daemon=True)
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
        while numbers := os.read(self._received, 1):  # empty once the other end is closed
            [number] = numbers
            if number in self._usual:
                self._hear(number)
