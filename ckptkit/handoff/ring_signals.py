"""Signal: a count that one process adds to and another takes from, both of which may wait for it (an eventfd).

Through three of them trainer and writer hand the arena's blocks to and fro: what the one wrote to memory before it
added to the count, the other sees after it took it.
"""

import contextlib
import os
import select
from collections.abc import Sequence
from typing import Protocol

FLAGS = os.EFD_CLOEXEC | os.EFD_NONBLOCK


class HasFile(Protocol):
    """A file, a pipe or a Signal."""

    def fileno(self) -> int: ...


def readable(files: Sequence[HasFile], timeout_s: float) -> list[HasFile]:
    """Return those of some files that have something to read or are closed at the other end; waits for the first one.

    Like `select`, and also where a process has more than 1,024 files open.
    """
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)
    ready = {fd for fd, _ in poll.poll(timeout_s * 1000)}
    return [file for file in files if file.fileno() in ready]


class Signal:
    """A shared count behind a file descriptor, at 0."""

    def __init__(self, fd: int | None = None) -> None:
        """Make a new one, or open the one that another process made."""
        self.fd = os.eventfd(0, FLAGS) if fd is None else fd

    def fileno(self) -> int:
        """Return the descriptor, so that `readable` takes a Signal."""
        return self.fd

    def add(self, count: int = 1) -> None:
        """Raise the count."""
        os.eventfd_write(self.fd, count)

    def take(self) -> int:
        """Return the count, which is 0 afterwards; never waits."""
        with contextlib.suppress(BlockingIOError):
            return os.eventfd_read(self.fd)
        return 0

    @property
    def is_set(self) -> bool:
        """Whether the count is above 0."""
        return bool(readable([self], 0.0))

    def close(self) -> None:
        """Close this process' descriptor."""
        os.close(self.fd)


class RingSignals:
    """The three counts of an arena: blocks `staged` by the trainer, blocks `released` by the writer, and `stop`.

    The trainer's process makes them and adds to `staged` and, if it drops the save, to `stop`. The writer's process
    opens them by their descriptors and adds to `released`.
    """

    def __init__(self, fds: Sequence[int] | None = None) -> None:
        """Make new ones, or open those behind the descriptors of another process' RingSignals."""
        self._signals = [Signal(fd) for fd in fds or (None, None, None)]
        self.staged, self.released, self.stop = self._signals

    @property
    def fds(self) -> list[int]:
        return [signal.fd for signal in self._signals]

    def reset(self) -> None:
        """Set all counts to 0; only while no save runs."""
        for signal in self._signals:
            signal.take()

    def close(self) -> None:
        """Close this process' descriptors."""
        for signal in self._signals:
            signal.close()
