"""MakingThread and MadeAhead: things that a thread makes in order, ahead of who takes them.

A thread pool of one thread would do. It takes some 15 us of its caller to ask and to be given, which is most of what a
step costs a training loop, and more where what is made has the processor's caches; here both are one call of a queue.
"""

import atexit
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakSet, finalize

Made = TypeVar("Made")
What = TypeVar("What")
EXIT_WITHIN_S = 10.0  # the end of a program waits so long for what is under way


class Ending(Protocol):
    """What has threads that the end of the program has to wait for."""

    def close(self) -> None:
        """Let the threads end soon."""

    def wait(self, until_s: float) -> None:
        """Wait for them up to a time of the monotonic clock."""


class _Failed:
    """What takes the place of a thing whose making raised."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class MadeAhead(Generic[Made]):
    """Things that were made ahead and not taken yet, in order; after one that failed no other is made."""

    def __init__(self) -> None:
        self._made: SimpleQueue[Made | _Failed] = SimpleQueue()
        self._ready = deque[Made | _Failed]()  # those of them that were waited for
        self.is_over = False  # nothing is made any more

    def make(self, make: Callable[[], Made]) -> None:
        """Make the next thing, on the thread."""
        if self.is_over:
            return
        try:
            self._made.put(make())
        except BaseException as error:
            self.is_over = True
            self._made.put(_Failed(error))

    def wait_for(self, count: int) -> None:
        """Wait until so many things are made, or as many as can be."""
        while len(self._ready) < count and not (self._ready and isinstance(self._ready[-1], _Failed)):
            self._ready.append(self._made.get())

    def take(self) -> Made:
        """Return the next thing once it is made, or raise what its making raised."""
        item = self._ready.popleft() if self._ready else self._made.get()
        if not isinstance(item, _Failed):
            return item
        try:
            raise item.error
        finally:
            del item  # the error names this frame, and would keep all that its traceback names


class MakingThread:
    """Begins with the first thing, and ends with `close`, with the last reference to it, or with the program."""

    def __init__(self, name: str) -> None:
        self._wanted: SimpleQueue[tuple[Callable[[Any], None], Any] | None] = SimpleQueue()
        self._thread = Thread(target=_make_all, args=(self._wanted,), name=name, daemon=True)
        self.is_closed = False

    def start(self) -> None:
        """Start the thread, if it does not run yet."""
        if self._thread.ident is None:
            self._thread.start()
            finalize(self, self._wanted.put, None).atexit = False
            end_with_program(self)

    def want(self, make: Callable[[What], None], what: What) -> None:
        """Let `make(what)`, which must not raise, be called after what was wanted before; not after `close`."""
        self._wanted.put((make, what))

    def close(self) -> None:
        """Let the thread end after what was asked for."""
        self.is_closed = True
        self._wanted.put(None)

    def wait(self, until_s: float | None = None) -> None:
        """Wait for the thread after `close`, up to a time of the monotonic clock."""
        if self._thread.ident is not None:
            self._thread.join(None if until_s is None else max(0.0, until_s - time.monotonic()))


def in_background() -> None:
    """Let this thread not take a processor from who runs when it wakes up: it may wait, a training loop may not.

    By the batch policy of sched(7), if it has the usual one.
    """
    with suppress(OSError):  # of a system that does not let it
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def end_with_program(what: Ending) -> None:
    """Let threads end before the interpreter does: one that comes back to it from native code then would abort it."""
    _all.add(what)


def _make_all(queue: "SimpleQueue[tuple[Callable[[Any], None], Any] | None]") -> None:
    in_background()
    while (each := queue.get()) is not None:
        make, what = each
        make(what)
        del each, make, what  # they may be what keeps the owner of this thread alive


_all: WeakSet[Ending] = WeakSet()


@atexit.register
def _end_all() -> None:
    ended = list(_all)
    for each in ended:
        each.close()
    until_s = time.monotonic() + EXIT_WITHIN_S
    for each in ended:
        each.wait(until_s)
