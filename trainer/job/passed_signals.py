"""HeardSignals: a thread hears signals while the main thread waits in a library, where no handler of Python's runs.

PassedSignals: what a launcher does with them: its ranks get them, save in their own time, and end.

torch's launcher alone kills ranks that still save 30 seconds after a signal, and dies of SIGUSR1 and SIGUSR2 itself.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)  # the job is over after one of these, whatever its ranks do
LOOK_EVERY_S, UNWIND_WITHIN_S = 0.05, 3.0


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


class PassedSignals:
    """Pass each signal on inside a `with`, by a thread: the main thread may wait in torch's store.

    `ended_by` is the first of ENDING that came, 0 before it.
    """

    def __init__(self) -> None:
        self.ended_by = 0
        self._reached: SimpleQueue[list[int]] = SimpleQueue()  # the ranks that each signal was sent to

    def __enter__(self) -> "PassedSignals":
        self._is_over = threading.Event()
        self._heard = HeardSignals((*ENDING, *ASKING), self._pass, self._end).__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._heard.__exit__()

    def _pass(self, number: int) -> None:
        ranks = ranks_here()
        for rank in ranks:
            with suppress(ProcessLookupError):
                if number in ASKING:
                    os.kill(rank, number)
                else:  # what a rank started, too, as torch's launcher does
                    os.killpg(rank, number)
        self._reached.put(ranks)
        if not ranks and not self._is_over.wait(UNWIND_WITHIN_S) and not ranks_here():
            os._exit(128 + number)  # the main thread waits for other launchers, and hears nothing

    def _end(self, number: int, _frame: FrameType | None) -> None:
        """Unwind the launcher if it has no ranks; after the first signal that ends the job, wait until they end."""
        ranks = self._reached.get()
        is_first, self.ended_by = not self.ended_by, self.ended_by or number * (number in ENDING)
        if not ranks or (is_first and number in ENDING and not all_end_well(ranks)):
            from torch.distributed.elastic.multiprocessing import SignalException

            raise SignalException(signal.Signals(number).name, signal.Signals(number))


def ranks_here() -> list[int]:
    """Return the processes that this one started and that lead a session, which torch makes of each rank."""
    ranks = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            state, parent, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if state != "Z" and int(parent) == os.getpid() and session == folder.name:
                ranks.append(int(folder.name))
    return ranks


def all_end_well(ranks: Sequence[int]) -> bool:
    """Wait until all ranks have ended, and return True; or False as soon as one ends with another code than 0.

    They stay zombies, for torch to read their codes too.
    """
    left = list(ranks)
    while left:
        for rank in list(left):
            with suppress(ChildProcessError):
                ended = os.waitid(os.P_PID, rank, os.WEXITED | os.WNOWAIT | os.WNOHANG)
                if ended is None:
                    continue
                if ended.si_status:
                    return False
            left.remove(rank)
        time.sleep(LOOK_EVERY_S)
    return True
