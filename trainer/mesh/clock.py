"""Clock: how long a step waited, by cause; events on CUDA, so that measuring never stalls the stream."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Seconds that the main thread spent in named spans since the last `read`."""

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

    def read(self) -> dict[str, float]:
        """Return the seconds by name since the last read; on CUDA call it after the step's own synchronisation."""
        for name, events in self._spans.items():
            for begin, end in events:
                end.synchronize()
                self._seconds[name] += begin.elapsed_time(end) / 1e3
        seconds = dict(self._seconds)
        self._spans.clear()
        self._seconds.clear()
        return seconds
