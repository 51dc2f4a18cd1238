"""Clock: how long a step waited, by cause; events on CUDA, so that measuring never stalls the stream."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Seconds that the main thread spent in named spans since the last `take`."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._spans: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = defaultdict(list)
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Count the time of the enclosed work under `name`."""
        if self._is_cuda:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._spans[name].append((begin, end))
        else:
            started = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - started

    def take(self) -> Callable[[], dict[str, float]]:
        """Take the spans since the last call; what is returned waits for their ends and returns seconds by name."""
        spans, seconds = self._spans, self._seconds
        self._spans, self._seconds = defaultdict(list), defaultdict(float)

        def read() -> dict[str, float]:
            for name, events in spans.items():
                for begin, end in events:
                    end.synchronize()
                    seconds[name] += begin.elapsed_time(end) / 1e3
            return dict(seconds)

        return read
