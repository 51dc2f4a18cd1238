"""FetchThreads: daemon threads that do what is wanted, of which the last to become idle takes the next.

So no more of them work than must, with memory that they have used already. Threads that take turns would each have
theirs, of a request's size, and the kernel clears it at first use: that takes as long as the request.
"""

import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock, Thread

from datakit.loading.making_thread import in_background

Work = Callable[[], None]


class FetchThreads:
    """A number of threads; what they do must not raise."""

    def __init__(self, num_threads: int) -> None:
        """Start the threads, which end with `close`."""
        self._lock, self._is_closed = Lock(), False
        self._waiting = deque[Work]()
        self._idle: list[SimpleQueue[Work | None]] = []  # each what its thread waits for
        self._threads = [Thread(target=self._do_all, name="datakit-fetch", daemon=True) for _ in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def want(self, work: Work) -> None:
        """Let something be done soon, after what was wanted before; not after `close`."""
        with self._lock:
            if self._is_closed:
                return
            if self._idle:
                self._idle.pop().put(work)
            else:
                self._waiting.append(work)

    def close(self) -> None:
        """Let the threads end after what they are doing; what waits is not done."""
        with self._lock:
            self._is_closed = True
            self._waiting.clear()
            for idle in self._idle:
                idle.put(None)

    def wait(self, until_s: float) -> None:
        """Wait for the threads after `close`, up to a time of the monotonic clock."""
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))

    def _do_all(self) -> None:
        in_background()
        queue = SimpleQueue[Work | None]()
        while (work := self._next(queue)) is not None:
            work()

    def _next(self, queue: "SimpleQueue[Work | None]") -> Work | None:
        with self._lock:
            if self._is_closed:
                return None
            if self._waiting:
                return self._waiting.popleft()
            self._idle.append(queue)
        return queue.get()
