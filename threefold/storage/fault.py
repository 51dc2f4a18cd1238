"""FaultStorage: a storage some of whose requests fail, as a test chooses."""

import math
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TypeVar

from threefold.storage.contract import Storage
from threefold.storage.wrapping import OPERATIONS, Request, WrappingStorage

T = TypeVar("T")


@dataclass
class Fault:
    """A failure of the requests with these operations and a key that matches `keys`, as file names match in a shell.

    Of those the first `after` are served, and the next `times` fail. With `served` they fail once the storage has done
    them, as they do when an answer is lost. `num_met` counts the failures.
    """

    error: BaseException
    operations: Collection[str] = OPERATIONS
    keys: str = "*"
    after: int = 0
    times: float = math.inf
    served: bool = False
    num_met: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        unknown = set(self.operations) - set(OPERATIONS)
        assert not unknown, f"{sorted(unknown)} are not operations of a storage"

    def strikes(self, request: Request) -> bool:
        """Return whether a request fails; it is counted."""
        if request.operation not in self.operations or not any(fnmatchcase(key, self.keys) for key in request.keys):
            return False
        if self.after > 0:
            self.after -= 1
            return False
        if self.num_met >= self.times:
            return False
        self.num_met += 1
        return True


class FaultStorage(WrappingStorage):
    """Another storage with faults, of which the first that strikes is raised.

    It names no local files: the bytes that a kit would write to them, or read, pass through it as well.
    """

    hides_files = True

    def __init__(self, storage: Storage, *faults: Fault) -> None:
        super().__init__(storage)
        self._faults = faults
        self._lock = threading.Lock()

    def _request(self, request: Request, work: Callable[[], T]) -> T:
        with self._lock:
            fault = next((fault for fault in self._faults if fault.strikes(request)), None)
        if fault is None:
            return work()
        if fault.served:
            work()
        raise fault.error
