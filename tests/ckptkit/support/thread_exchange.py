"""ThreadExchange: the ranks of a job as threads of one process."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from threading import Barrier
from typing import Any


class ThreadExchange:
    """An exchange of threads."""

    def __init__(self, size: int, timeout_s: float = 20) -> None:
        self.rank, self.size = 0, size
        self._boxes: list[Any] = [None] * size
        self._barrier = Barrier(size, timeout=timeout_s)

    def of(self, rank: int) -> "ThreadExchange":
        other = copy(self)
        other.rank = rank
        return other

    def all_gather(self, data: Any) -> list[Any]:
        self._boxes[self.rank] = data
        self._barrier.wait()
        found = list(self._boxes)
        self._barrier.wait()
        return found

    def all_to_all(self, send: Any) -> list[Any]:
        return [each[self.rank] for each in self.all_gather(list(send))]

    def run(self, function: Callable[["ThreadExchange"], Any]) -> list[Any]:
        """Call a function with the exchange of each rank, a thread each; a fault of one is the error of all."""

        def work(rank: int) -> Any:
            try:
                return function(self.of(rank))
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            done = [pool.submit(work, rank) for rank in range(self.size)]
        faults = [fault for each in done if (fault := each.exception()) is not None]
        if faults:
            raise min(faults, key=lambda fault: type(fault).__name__ == "BrokenBarrierError")
        return [each.result() for each in done]
