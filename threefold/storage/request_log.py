"""LoggingStorage: a storage that reports each request, once it is answered; THREEFOLD_DEBUG=1 prints them.

Files that a kit writes and reads directly on a local disk (`local_path`) are not requests, and not reported.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from threefold.storage.contract import Storage
from threefold.storage.wrapping import Request, WrappingStorage

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a request: the error, None for success, and the seconds it took."""

    url: str
    request: Request
    took_s: float
    error: BaseException | None = None

    def __str__(self) -> str:
        request = self.request
        size = "" if request.num_bytes is None else f" {request.num_bytes:,} bytes"
        keys = " ".join(request.keys[:2]) + (f" and {len(request.keys) - 2} more" if request.keys[2:] else "")
        failed = f": {type(self.error).__name__}" if self.error else ""
        return f"{request.operation} {self.url} {keys or '-'}{size} {1000 * self.took_s:.1f} ms{failed}"


class LoggingStorage(WrappingStorage):
    """Another storage, whose answers `log` gets, in the thread that asked."""

    def __init__(self, storage: Storage, log: Callable[[Answer], object]) -> None:
        super().__init__(storage)
        self._log = log

    def _request(self, request: Request, work: Callable[[], T]) -> T:
        started = time.monotonic()
        try:
            found = work()
        except BaseException as error:
            self._log(Answer(self.url, request, time.monotonic() - started, error))
            raise
        self._log(Answer(self.url, request, time.monotonic() - started))
        return found
