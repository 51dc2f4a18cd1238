"""A second look: what was read and is not right is read once more, on a new connection and past caches.

A bit may flip on its way from a server, and an answer may end early, while the server holds the right bytes. Disks of
this machine are asked once: what they return is what they hold.
"""

from collections.abc import Callable
from typing import TypeVar

from threefold.console import log
from threefold.errors import CheckFailed
from threefold.storage.contract import CutShort, Storage

T = TypeVar("T")


def read_checked(storage: Storage, place: str, read: Callable[[Storage], T]) -> T:
    """Return what `read` returns, which reads `place` and raises CheckFailed if its bytes are not right.

    Behind a network that decides at the second look alone.
    """
    try:
        return read(storage)
    except (CheckFailed, CutShort):
        again = storage.afresh()
        if again is None:
            raise
        found = read(again)
    say_right(place)
    return found


def say_right(place: str) -> None:
    """Log that a second look found the right bytes."""
    log(f"{place} differed once, then was right: bits were changed on the way, what is stored is sound")
