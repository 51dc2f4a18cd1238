"""MakingThread: a thread that makes things in order, ahead of who asks for them.

A thread pool of one thread would do. It takes some 15 us of its caller to ask and to be given, which is most of what a
step costs a training loop; here it is 3.
"""

import atexit
import time
from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakSet, finalize

Made = TypeVar("Made")
EXIT_WITHIN_S = 10.0  # the end of a program waits so long for what is under way


class Ending(Protocol):
    """What has threads that the end of the program has to wait for."""

    def close(self) -> None:
        """Let the threads end soon."""

    def wait(self, until_s: float) -> None:
        """Wait for them up to a time of the monotonic clock."""


class Making(Generic[Made]):
    """A thing that is being made, or will be."""

    def __init__(self, make: Callable[[], Made]) -> None:
        self._make: Callable[[], Made] | None = make
        self._made: list[Made] = []
        self._error: BaseException | None = None
        self._is_over = Lock()
        self._is_over.acquire()

    def cancel(self) -> None:
        """Let it not be made, if it is not being made yet; its result must not be asked for."""
        self._make = None

    def result(self) -> Made:
        """Return the thing once it is made, or raise what its making raised; to be called once."""
        self._is_over.acquire()
        if self._error is not None:
            error, self._error = self._error, None  # an error that is kept would keep what its traceback names
            raise error
        return self._made.pop()

    def run(self) -> None:
        """Make it, on the thread."""
        make, self._make = self._make, None
        try:
            if make:
                self._made.append(make())
        except BaseException as error:
            self._error = error
        self._is_over.release()


class MakingThread:
    """Begins with the first thing, and ends with `close`, with the last reference to it, or with the program."""

    def __init__(self, name: str) -> None:
        self._wanted: SimpleQueue[Making[Any] | None] = SimpleQueue()
        self._thread = Thread(target=_make_all, args=(self._wanted,), name=name, daemon=True)
        self.is_closed = False

    def submit(self, make: Callable[[], Made]) -> Making[Made]:
        """Let a thing be made, after those that were asked for before; not after `close`."""
        assert not self.is_closed, "what is closed makes nothing"
        if self._thread.ident is None:
            self._thread.start()
            finalize(self, self._wanted.put, None).atexit = False
            end_with_program(self)
        making = Making(make)
        self._wanted.put(making)
        return making

    def close(self) -> None:
        """Let the thread end after what was asked for."""
        self.is_closed = True
        self._wanted.put(None)

    def wait(self, until_s: float | None = None) -> None:
        """Wait for the thread after `close`, up to a time of the monotonic clock."""
        if self._thread.ident is not None:
            self._thread.join(None if until_s is None else max(0.0, until_s - time.monotonic()))


def end_with_program(what: Ending) -> None:
    """Let threads end before the interpreter does: one that comes back to it from native code then would abort it."""
    _all.add(what)


def _make_all(wanted: "SimpleQueue[Making[Any] | None]") -> None:
    while (making := wanted.get()) is not None:
        making.run()
        del making  # it may be what keeps the owner of this thread alive


_all: WeakSet[Ending] = WeakSet()


@atexit.register
def _end_all() -> None:
    ended = list(_all)
    for each in ended:
        each.close()
    until_s = time.monotonic() + EXIT_WITHIN_S
    for each in ended:
        each.wait(until_s)
