"""Moments of a device's work, and how long a step waited, by cause; measuring never stalls a CUDA stream."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Moment:
    """When a device reaches this point of its work: on a GPU by an event, for which the host does not wait."""

    def __init__(self, device: torch.device) -> None:
        """Mark the point after all work enqueued so far on the current stream; while a graph is recorded there is none.

        `is_real` says whether there is one.
        """
        self._seconds, self._event, self.is_real = time.perf_counter(), None, True
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self.is_real = False
        elif device.type == "cuda":
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
    """Seconds that the main thread spent in named spans since the last `take`.

    A step on a GPU has thousands of short waits in its passes. To mark the moments of each takes the host up to a fifth
    of a step, so those of one micro-batch stand for all: see `sampling`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.last = device, Moment(device)  # the end of the last span
        self._spans: dict[str, list[tuple[Moment, Moment, int]]] = defaultdict(list)
        self._times = 1

    def span(self, name: str, *, is_sampled: bool = False) -> "Span":
        """Count the time of the enclosed work under `name`, or as often as `sampling` says."""
        return Span(self, name, self._times if is_sampled else 1)

    def add(self, name: str, begin: Moment, times: int) -> None:
        """Count the time from a moment until now so many times."""
        self.last = Moment(self._device)
        if self.last.is_real:
            self._spans[name].append((begin, self.last, times))

    @contextmanager
    def sampling(self, times: int) -> Iterator[None]:
        """On a GPU count the sampled spans inside so many times, with 0 not at all."""
        before, self._times = self._times, times if self._device.type == "cuda" else 1
        try:
            yield
        finally:
            self._times = before

    def moment(self) -> Moment:
        """Return this point of the device's work."""
        return Moment(self._device)

    def take(self) -> Callable[[], dict[str, float]]:
        """Take the spans since the last call; what is returned waits for their ends and returns seconds by name."""
        spans, self._spans = self._spans, defaultdict(list)
        return lambda: {
            name: sum(end.seconds_since(begin) * times for begin, end, times in moments)
            for name, moments in spans.items()
        }


class Span:
    """Counts the time of what it encloses, unless that fails."""

    __slots__ = ("_begin", "_clock", "_name", "_times")

    def __init__(self, clock: Clock, name: str, times: int) -> None:
        self._clock, self._name, self._times = clock, name, times

    def __enter__(self) -> bool:
        """Return whether it counts."""
        if self._times:
            self._begin = self._clock.moment()
        return self._times > 0

    def __exit__(self, kind: type[BaseException] | None, _error: object, _traceback: object) -> None:
        if self._times and kind is None:
            self._clock.add(self._name, self._begin, self._times)
