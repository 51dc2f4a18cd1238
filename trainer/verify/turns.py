"""Turns: which of the ranks that are threads runs, when what they exchange arrives, and what none of them can wait for.

One rank runs at a time. At each call and each wait another may be next, as an Order says: the first in line, or one
that is drawn. A transfer whose ranks are all there may arrive later by the clock, which counts turns and no time. So
the same order is the same run. When no rank can go on that is an error at once, which says where each of them is.
"""

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Any, Protocol

from torch import Tensor


class Deadlock(Exception):
    """No rank can go on."""


class Stopped(Exception):
    """Another rank failed."""


class Died(Exception):
    """A rank ended at a call, as a process that is killed: others do not hear of it, and wait."""


class Order(Protocol):
    """Decides what is next; each answer is asked for in the order of the run."""

    def pick(self, num_ready: int) -> int:
        """Return which of the ranks that can go on does."""

    def lets_others(self, rank: int) -> bool:
        """Return whether a rank at a call lets others go first."""

    def delay(self) -> int:
        """Return how many turns later a transfer arrives, at least."""

    def dies(self, rank: int, call: int) -> bool:
        """Return whether a rank ends at its call of this number, from 1."""


class FirstCome:
    """The first in line is next, and all arrives at once."""

    def pick(self, num_ready: int) -> int:
        return 0

    def lets_others(self, rank: int) -> bool:
        return False

    def delay(self) -> int:
        return 0

    def dies(self, rank: int, call: int) -> bool:
        return False


class Transfer:
    """What ranks wait for: a collective that all of them join, or a tensor on its way."""

    def __init__(self, what: str, tensor: Tensor, arguments: tuple[Any, ...] = ()) -> None:
        self.what, self.tensor = what, tensor
        self.form = (what, tensor.numel(), tensor.dtype, *arguments)
        self.joined: dict[int, tuple[Tensor, Any]] = {}  # and its share
        self.is_done = False

    def __str__(self) -> str:
        return f"{self.what}, which places {sorted(self.joined)} joined" if self.joined else self.what

    def check(self, other: "Transfer") -> None:
        if self.form[1:] != other.form[1:] or (self.joined and self.form != other.form):
            raise RuntimeError(f"calls differ: {other.form} meets {self.form}")


class Turns:
    """Whose turn it is among the threads of ranks, and of others behind them, whose `names` errors use.

    `clock` counts turns, `seen` how often situations came that only some orders come to.
    """

    def __init__(self, names: Sequence[str], order: Order) -> None:
        self.names, self.order = names, order
        self._may_run = [threading.Lock() for _ in names]  # held by a rank while it may not
        for lock in self._may_run:
            lock.acquire()
        self._ready = deque(range(len(names)))
        self._waits: dict[int, Transfer] = {}
        self._arriving: list[tuple[int, int, Sequence[Transfer], Callable[[], None]]] = []
        self._latest: dict[object, int] = defaultdict(int)  # arrival on a channel
        self._numbers, self.clock, self.calls = count(), 0, Counter[int]()
        self.places: dict[int, str] = {}
        self.dead: dict[int, str] = {}
        self.seen = Counter[str]()
        self.error: BaseException | None = None

    def begin(self, rank: int) -> None:
        self._may_run[rank].acquire()

    def end(self, rank: int) -> None:
        self.pass_on()

    def call(self, rank: int, what: str) -> None:
        """Begin a call of a rank, at which it may end, or let others go first."""
        self.calls[rank] += 1
        if self.order.dies(rank, self.calls[rank]):
            raise Died(f"{self._place(rank)} ended at its call {self.calls[rank]}, {what}")
        if self.order.lets_others(rank):
            self._ready.append(rank)
            self.pass_on()
            self._resume(rank)

    def wait(self, rank: int, transfer: Transfer) -> None:
        """Return once the transfer is done; meanwhile others run."""
        if not transfer.is_done:
            self._waits[rank] = transfer
            self.pass_on()
            self._resume(rank)

    def _resume(self, rank: int) -> None:
        self._may_run[rank].acquire()
        self.raise_if_stopped()

    def finish(
        self, transfers: Sequence[Transfer], carry: Callable[[], None], channel: object = None, *, lag: int = 0
    ) -> None:
        """Let transfers whose ranks are all there arrive, in the order of their channel; who waits can go on then.

        They arrive `lag` turns later than the order says.
        """
        delay = self.order.delay() + lag
        arrival = max(self.clock + delay, 0 if channel is None else self._latest[channel])
        if delay > lag:
            self.seen["a message was late"] += 1
        if arrival <= self.clock and not self._arriving:
            self._arrive(transfers, carry)
            return
        self._latest[channel] = arrival
        heappush(self._arriving, (arrival, next(self._numbers), transfers, carry))

    def _arrive(self, transfers: Sequence[Transfer], carry: Callable[[], None]) -> None:
        carry()
        for transfer in transfers:
            transfer.is_done = True
        self._wake(rank for rank, waited in self._waits.items() if waited.is_done)

    def pass_on(self) -> None:
        """Let the next rank run."""
        self.clock += 1
        while self._arriving and (self._arriving[0][0] <= self.clock or not self._ready):
            arrival, _, transfers, carry = heappop(self._arriving)
            self.clock = max(self.clock, arrival)
            try:
                self._arrive(transfers, carry)
            except Exception as error:
                self.stop(error)
        if not self._ready and self._waits:
            texts = [f"{self._place(rank)} waits for {transfer}" for rank, transfer in sorted(self._waits.items())]
            self.stop(Deadlock("no rank can go on: " + "; ".join([*self.dead.values(), *texts])))
        if self._ready:
            number = self.order.pick(len(self._ready))
            rank = self._ready[number]
            del self._ready[number]
            self._may_run[rank].release()

    def _place(self, rank: int) -> str:
        place = self.places.get(rank, "")
        return f"{self.names[rank]} ({place})" if place else self.names[rank]

    def bury(self, rank: int, death: Died) -> None:
        """Note that a rank ended, of which no other rank hears."""
        self.dead[rank] = str(death)
        self.places.pop(rank, None)

    def stop(self, error: BaseException) -> None:
        """End all ranks; the first error is kept."""
        self.error = self.error or error
        self._wake(self._waits)

    def raise_if_stopped(self) -> None:
        if self.error is not None:
            raise Stopped("another rank failed")

    def _wake(self, ranks: Iterable[int]) -> None:
        for rank in sorted(ranks):
            del self._waits[rank]
            self._ready.append(rank)
