"""Times of calls on a GPU, as a choice among forms takes them."""

import statistics
from collections.abc import Callable

import torch

WARM_UPS, ROUNDS = 2, 5


def median_seconds(call: Callable[[], object]) -> float:
    """Return the median time of a call on the device, from where the stream reaches it to its end."""
    times = []
    for _ in range(WARM_UPS + ROUNDS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(times[WARM_UPS:])
