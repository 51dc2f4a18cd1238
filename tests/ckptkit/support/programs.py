"""Programs of a simulation: threads of which one runs at a time, and what they see of storage and of time.

The simulation they are given chooses who goes on (`choose`), serves their requests (`serve`), ages what they list
(`aged`) or hides it (`hidden`), has the time (`clock`) and learns of their ends (`end`, `failure`).
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from threefold.storage import ObjectInfo
from threefold.storage.contract import Buffer, buffers_of
from threefold.storage.wrapping import Request, WrappingStorage

T = TypeVar("T")
LEAST_S = 0.001  # by which a pause is longer than was asked for, as no clock is exact
MAX_TURNS = 600  # of one verb
MOST_TURNS = {"tier": 10 * MAX_TURNS}  # a follower looks for its leader's mark each second while its job goes on


class Killed(BaseException):
    """The end of a program that was killed: nothing catches it."""


class Hung(BaseException):
    """A verb does not come to its end; no program catches it."""


@dataclass(eq=False)
class Verb:
    """What a program does now: to which step, since which change of the place, in how many turns so far."""

    name: str
    step: int
    began: int = 0
    num_turns: int = 0
    num_begun: int = 0  # tries at a copy to a tier
    is_half: bool = False  # a root went, and what it named did not yet


class Program:
    """One program: a thread that hands the turn on before each request, often to itself.

    Programs of one `process`, the name before the first point and the number after it, are killed together.
    """

    def __init__(self, simulation: Any, name: str, work: Callable[["Program"], None]) -> None:
        self.name, self.process, self.is_over, self.is_killed = name, name.removesuffix(".tier"), False, False
        self.wakes_at, self.last_turn, self.verb = 0.0, 0, Verb("begin", 0)
        self._simulation, self._work = simulation, work
        self._go = threading.Lock()
        self._go.acquire()
        self._places = {place: TurnStorage(simulation, self, place) for place in simulation.places}
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def storage(self) -> "TurnStorage":
        """The run."""
        return self.at("memory://run")

    def at(self, url: str) -> "TurnStorage":
        """Return a place as this program sees it."""
        return self._places[url]

    @contextmanager
    def doing(self, name: str, step: int = 0) -> Iterator[Verb]:
        """Do a verb in the block: it must come to its end."""
        before, self.verb = self.verb, Verb(name, step, self._simulation.num_changes)
        try:
            yield self.verb
        finally:
            self.verb = before

    def resume(self) -> None:
        """Let the program run; called by the thread that runs, which waits or ends then."""
        self._go.release()

    def turn(self) -> None:
        """Let the seed choose who goes on; return when it is this program."""
        if not self.is_killed:
            self.verb.num_turns += 1
            if self.verb.num_turns > MOST_TURNS.get(self.verb.name, MAX_TURNS):
                raise Hung(f"{self.name} does not end its {self.verb.name} of step {self.verb.step}")
            chosen = self._simulation.choose(self)
            if chosen is not self:
                chosen.resume()
                self._go.acquire()
        if self.is_killed:
            raise Killed

    def sleep(self, seconds: float) -> None:
        """Let others go on for some time."""
        self.wakes_at = self._simulation.clock.now + seconds + LEAST_S
        self.turn()

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
    """A place as one program sees it: a turn before each request, faults, and what dead programs left looks old."""

    def __init__(self, simulation: Any, program: Program, place: str) -> None:
        super().__init__(simulation.places[place])
        self._simulation, self._program = simulation, program

    def write(
        self, key: str, data: Buffer | Iterable[Buffer], *, if_absent: bool = False, size_bytes: int | None = None
    ) -> None:
        """Write what is there now, also if it lands once the memory has other bytes."""
        content = b"".join(buffers_of(data))
        super().write(key, content, if_absent=if_absent, size_bytes=size_bytes)

    def _request(self, request: Request, work: Callable[[], T]) -> T:
        self._program.turn()
        return self._simulation.serve(self._program, self.url, request, work)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        items = tuple(super().list(prefix))
        hidden = self._hidden()
        return (self._simulation.aged(self.url, item) for item in items if item.key not in hidden)

    def list_keys(self, prefix: str = "") -> Iterator[str]:
        keys = tuple(super().list_keys(prefix))
        hidden = self._hidden()
        return (key for key in keys if key not in hidden)

    def list_folders(self, prefix: str = "") -> Iterator[str]:
        names = tuple(super().list_folders(prefix))
        hidden = self._hidden()
        shown = {key for key in self._storage.list_keys(prefix) if key not in hidden}
        return (name for name in names if any(key.startswith(f"{prefix}{name}/") for key in shown))

    def _hidden(self) -> Set[str]:
        """Return the keys that a listing that is late does not show yet."""
        hidden: Set[str] = self._simulation.hidden(self._program, self.url)
        return hidden
