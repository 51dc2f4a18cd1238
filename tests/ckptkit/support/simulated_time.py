"""Time that passes with requests and pauses: what stands for the module `time` in ckptkit while programs are simulated.

The programs' turns let it pass (`now`), and say which of them runs: a pause is that one's, and so is a storage that is
opened by its URL. Pauses that are random by themselves are drawn from a generator of its own.
"""

import random
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ckptkit.writer.retries import Retries

EPOCH_S = 1_000_000_000.0


class SimulatedTime:
    """A clock that a simulation moves on; one thread at a time uses it."""

    def __init__(self) -> None:
        self.now, self.running = 0.0, None  # seconds since the beginning, and the program whose turn it is
        self.random = random.Random(0)

    def begin(self, seed: int) -> None:
        """Begin a simulation."""
        self.now, self.running, self.random = 0.0, None, random.Random(seed)

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return EPOCH_S + self.now

    def sleep(self, seconds: float) -> None:
        self.running.sleep(seconds)

    def uniform(self, low: float, high: float) -> float:
        return self.random.uniform(low, high)

    def open_storage(self, url: str) -> Any:
        """Open a place as the program that runs sees it."""
        return self.running.at(url)


class PausingCondition:
    """A threading.Condition of programs of which one runs at a time: a wait is a pause."""

    def __init__(self, clock: SimulatedTime) -> None:
        self._clock = clock

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def notify(self) -> None:
        pass

    def wait(self, seconds: float) -> None:
        self._clock.sleep(seconds)


class NoThread:
    """A threading.Thread whose work a program does."""

    def __init__(self, *, target: Callable[[], None], **_: object) -> None:
        pass

    def start(self) -> None:
        pass

    def join(self) -> None:
        pass


def simulated_time(monkeypatch: pytest.MonkeyPatch) -> SimulatedTime:
    """Let all loaded modules of ckptkit, and those that pause or date for it, have a simulated time; return it."""
    clock = SimulatedTime()
    others = ("threefold.backoff", "threefold.storage.memory")
    for name, module in list(sys.modules.items()):
        if (name.startswith("ckptkit.") or name in others) and vars(module).get("time") is time:
            monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr("threefold.backoff.random", clock)
    *defaults, _ = Retries.__init__.__defaults__
    monkeypatch.setattr(Retries.__init__, "__defaults__", (*defaults, clock.sleep))
    threading = SimpleNamespace(Condition=lambda: PausingCondition(clock), Thread=NoThread)
    monkeypatch.setattr("ckptkit.writer.copier.threading", threading)
    for module_name in ("copier", "maintenance"):
        monkeypatch.setattr(f"ckptkit.writer.{module_name}.open_storage", clock.open_storage)
    return clock
