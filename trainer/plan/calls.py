"""What calls between ranks take on the device, and how much of one a product beside it hides.

A call alone takes as long as its host does to make it, and a call of a step does not: there the host is ahead. So the
device is kept busy before each, and a small sum behind that lets all ranks begin at once.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from trainer.job.ranks import Ranks
from trainer.mesh.group import Group
from trainer.mesh.mesh import ProcessMesh
from trainer.plan.calibration import PartRate
from trainer.plan.probes import Scale
from trainer.run.bench_comm import rows_of_groups, timed

MIB, BESIDE_MIB = (0.0625, 1.0, 16.0, 128.0), {"cuda": (16.0, 128.0), "cpu": (0.25,)}
REPEATS, BUSY = 10, 12  # how many products of the largest side that is measured keep a GPU busy
LEAST = 1e-3  # of a call that is hidden: a rate is above 0


class Busy:
    """What is enqueued before a call: some products on a GPU, and a sum that all ranks wait for."""

    def __init__(self, group: Group, scale: Scale, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        side, self._number, self._group = scale.hidden[1], BUSY if on_gpu else 0, group
        self._square = torch.zeros(side, side, dtype=torch.bfloat16 if on_gpu else torch.float32, device=device)
        self._result, self._sum = torch.empty_like(self._square), torch.zeros(1, device=device)

    def __call__(self) -> None:
        """Enqueue it."""
        for _ in range(self._number):
            torch.mm(self._square, self._square, out=self._result)
        self._group.start("all_reduce", self._sum, "sum").wait()


def call_figures(ranks: Ranks, mesh: ProcessMesh, scale: Scale) -> Iterator[PartRate]:
    """Yield those of collectives of all ranks, and of some beside products; all ranks call it."""
    busy = Busy(mesh.dp, scale, mesh.device)
    for row in rows_of_groups(ranks, mesh, MIB, REPEATS, busy):
        place = float(row.num_bytes), float(row.num_ranks)
        yield PartRate("collective", row.operation, "any", place, row.bus_bytes_per_s * row.seconds, row.seconds)
    for size in BESIDE_MIB[mesh.device.type]:
        for operation in ("all_gather", "reduce_scatter"):
            yield beside_figure(ranks, mesh, operation, int(size * 2**20), (scale.hidden[-1], busy))


def beside_figure(
    ranks: Ranks, mesh: ProcessMesh, operation: str, num_bytes: int, rest: tuple[int, Callable[[], None]]
) -> PartRate:
    """Return how much a call and a product hide of each other: what both take alone, less what they take together.

    For example 4 ms and 3 ms that are 5 ms together hide 2 of 3.
    """
    columns, busy = rest
    dtype = torch.bfloat16 if mesh.device.type == "cuda" else torch.float32
    tensor = torch.zeros(num_bytes // dtype.itemsize // columns, columns, dtype=dtype, device=mesh.device)
    other, weight = torch.zeros_like(tensor), torch.zeros(columns, 2 * columns, dtype=dtype, device=mesh.device)
    out = torch.empty(len(tensor), 2 * columns, dtype=dtype, device=mesh.device)

    def call(product: Callable[[], Tensor] | None) -> None:
        work = mesh.dp.start(operation, tensor)
        if product is not None:
            product()
        work.wait()

    product = partial(torch.mm, other, weight, out=out)
    alone, made, both = (
        timed(ranks, how, REPEATS, busy) for how in (partial(call, None), product, partial(call, product))
    )
    shorter = min(alone, made)
    hidden = min(max(alone + made - both, LEAST * shorter), shorter)
    return PartRate("beside", operation, "any", (float(num_bytes), float(mesh.dp.size)), hidden, shorter)
