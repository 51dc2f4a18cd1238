"""Moments of a device's work, and how long a step waited, by cause; measuring never stalls a CUDA stream."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Moment:
    """When a device reaches this point of its work: on a GPU by an event, for which the host does not wait."""

    def __init__(self, device: torch.device) -> None:
        """Mark the point after all work enqueued so far on the current stream."""
        self._seconds, self._event = time.perf_counter(), None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    @property
    def is_past(self) -> bool:
        """Return whether the device was there; nothing waits."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Wait until the device is there."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: "Moment") -> float:
        """Wait until the device is there; return its time since an earlier moment."""
        self.wait()
        if self._event is None or earlier._event is None:
            return self._seconds - earlier._seconds
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class Clock:
    """Seconds that the main thread spent in named spans since the last `take`."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.last = device, Moment(device)  # the end of the last span
        self._spans: dict[str, list[tuple[Moment, Moment]]] = defaultdict(list)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Count the time of the enclosed work under `name`."""
        begin = Moment(self._device)
        yield
        self.last = Moment(self._device)
        self._spans[name].append((begin, self.last))

    def take(self) -> Callable[[], dict[str, float]]:
        """Take the spans since the last call; what is returned waits for their ends and returns seconds by name."""
        spans, self._spans = self._spans, defaultdict(list)
        return lambda: {
            name: sum(end.seconds_since(begin) for begin, end in moments) for name, moments in spans.items()
        }
