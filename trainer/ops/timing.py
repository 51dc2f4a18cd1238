"""Times of calls on a GPU, as a choice among forms takes them."""

import statistics
from collections.abc import Callable, Sequence

import torch

from trainer.mesh.mesh import ProcessMesh

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


def slowest_seconds(
    call: Callable[[int], object],
    numbers: Sequence[int],
    mesh: ProcessMesh,
    seconds_of: Callable[[Callable[[], object]], float] = median_seconds,
) -> list[float]:
    """Return how long a call with each number takes on the rank where it takes longest; all ranks call it."""
    seconds = [seconds_of(lambda number=number: call(number)) for number in numbers]  # type: ignore[misc]
    return mesh.world.all_reduce(torch.tensor(seconds, dtype=torch.float64, device=mesh.device), "max").tolist()
