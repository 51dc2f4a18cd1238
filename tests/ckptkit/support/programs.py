"""Programs of a simulation: threads of which one runs at a time, and what they see of the run and of time.

The simulation they are given chooses who goes on (`choose`), serves their requests (`serve`), ages what they list
(`aged`), counts changes of the run (`num_changes`) and learns of their ends (`end`, `failure`).
"""

import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from ckptkit.writer.retries import Retries
from threefold.storage import ObjectInfo, TemporaryFailure
from threefold.storage.wrapping import Request, WrappingStorage

T = TypeVar("T")


class Killed(BaseException):
    """The end of a program that was killed: nothing catches it."""


class Program:
    """One program: a thread that hands the turn on before each request, often to itself."""

    def __init__(self, simulation: Any, name: str, work: Callable[["Program"], None]) -> None:
        self.name, self.is_over, self.is_killed = name, False, False
        self.wakes_after = -1  # it has nothing to do before so many changes of the run
        self._simulation, self._work = simulation, work
        self._go = threading.Lock()
        self._go.acquire()
        self.storage = TurnStorage(simulation, self)
        threading.Thread(target=self._run, daemon=True).start()

    def resume(self) -> None:
        """Let the program run; called by the thread that runs, which waits or ends then."""
        self._go.release()

    def turn(self) -> None:
        """Let the seed choose who goes on; return when it is this program."""
        if not self.is_killed:
            chosen = self._simulation.choose(self)
            if chosen is not self:
                chosen.resume()
                self._go.acquire()
        if self.is_killed:
            raise Killed

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self.is_killed:
                self._work(self)
        except Killed:
            pass
        except BaseException as error:  # for the thread that made the simulation
            self._simulation.failure = self._simulation.failure or error
        self.is_over = True
        self._simulation.end(self)


class TurnStorage(WrappingStorage):
    """The run as one program sees it: a turn before each request, faults, and what dead programs left looks old."""

    def __init__(self, simulation: Any, program: Program) -> None:
        super().__init__(simulation.store)
        self._simulation, self._program = simulation, program

    def _request(self, request: Request, work: Callable[[], T]) -> T:
        self._program.turn()
        return self._simulation.serve(self._program, request, work)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return (self._simulation.aged(item) for item in super().list(prefix))


class Turns(Retries):
    """Retries and pauses that take turns instead of seconds."""

    def __init__(self, simulation: Any, program: Program) -> None:
        super().__init__()
        self._simulation, self._program = simulation, program

    def run(self, work: Callable[[], T], *, checks: bool = True) -> T:
        for _ in range(3):
            try:
                return work()
            except TemporaryFailure:
                self._program.turn()
        return work()

    def pause(self, seconds: float) -> None:
        self._program.wakes_after = self._simulation.num_changes
        self._program.turn()
