"""RepeatingStorage: a storage whose requests are repeated if the server did not answer, each after a longer pause.

That comes on top of what a client library repeats by itself: some give up on an answer that breaks off in its body.
A read or a look-up is not begun again once three times the deadline of a request are over, so a server that takes
requests and never answers is an error after a few minutes.
"""

import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from threefold.backoff import Backoff
from threefold.storage import is_local, open_storage
from threefold.storage.contract import Buffer, Storage, TemporaryFailure
from threefold.storage.service import REPEAT_WITHIN_TIMEOUTS, request_timeout_s
from threefold.storage.wrapping import Request, WrappingStorage

T = TypeVar("T")
MAX_ATTEMPTS, FIRST_PAUSE_S = 5, 0.2
SHORT = ("read", "read_ranges", "info")  # operations of one request; others may take many, of minutes in all


def open_repeating(url: str | Path, *, write_memory_bytes: int | None = None) -> Storage:
    """Return the storage behind a path or URL (see `open_storage`); of all but local folders requests are repeated."""
    storage = open_storage(url, write_memory_bytes=write_memory_bytes)
    return storage if is_local(storage) else RepeatingStorage(storage)


def repeating(work: Callable[[], T], *, within_s: float = math.inf) -> T:
    """Return what a request returns, at the latest at its fifth attempt, begun within so long; else its last failure.

    Only a TemporaryFailure is cause for another attempt.
    """
    backoff = Backoff(FIRST_PAUSE_S, max_tries=MAX_ATTEMPTS, within_s=within_s)
    while True:
        try:
            return work()
        except TemporaryFailure:
            if (pause_s := backoff.next_s()) is None:
                raise
        time.sleep(pause_s)


class RepeatingStorage(WrappingStorage):
    """Another storage with patience; a write of an iterable is tried once, since its buffers are gone then."""

    def _request(self, request: Request, work: Callable[[], T]) -> T:
        return repeating(
            work, within_s=REPEAT_WITHIN_TIMEOUTS * request_timeout_s() if request.operation in SHORT else math.inf
        )

    def write(
        self, key: str, data: Buffer | Iterable[Buffer], *, if_absent: bool = False, size_bytes: int | None = None
    ) -> None:
        write = super().write if isinstance(data, bytes | bytearray | memoryview) else self._storage.write
        write(key, data, if_absent=if_absent, size_bytes=size_bytes)
