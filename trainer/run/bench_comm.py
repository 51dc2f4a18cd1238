"""The bandwidth of a layout's groups: each collective and transfer that training makes, at several sizes.

Bus bandwidth is as nccl-tests define it: bytes over time, times what a link of the slowest ring carries of them, which
is 2 (n - 1) / n for an all-reduce of n ranks, (n - 1) / n for a gather, a reduce-scatter or an all-to-all, and 1 for a
broadcast or a transfer. So figures of groups of other sizes compare with each other and with the hardware's.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ckptkit import ParallelLayout
from threefold.errors import UserError
from trainer.job.ranks import Ranks
from trainer.mesh.clock import Moment
from trainer.mesh.group import Group
from trainer.mesh.layout import Axis
from trainer.mesh.mesh import ProcessMesh

WARM_UPS = 2
OPERATIONS: dict[str, tuple[str | int, ...]] = {
    "all_reduce": ("sum",),
    "all_gather": (),
    "reduce_scatter": (),
    "broadcast": (0,),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One operation of the groups of a name, all of them at once: the median time of the slowest rank."""

    group: str
    num_ranks: int
    operation: str
    num_bytes: int
    seconds: float

    @property
    def bus_bytes_per_s(self) -> float:
        """Return the bus bandwidth."""
        return self.num_bytes / self.seconds * bus_factor(self.operation, self.num_ranks)


def bus_factor(operation: str, num_ranks: int) -> float:
    """Return how often a link carries each byte: for example 1.5 for an all-reduce of four ranks."""
    share = (num_ranks - 1) / num_ranks
    return {"all_reduce": 2 * share, "broadcast": 1.0, "send": 1.0}.get(operation, share)


def bench_comm(
    device: str, cuts: tuple[int, int, int], dp_shard: int, sizes: Sequence[float], repeats: int, timeout_s: float
) -> list[Row]:
    """Return a row for each group of two or more ranks, each operation and each of the sizes in MiB; all ranks call it.

    `cuts` are tp, cp and pp; what they leave over is dp. Raises UserError where they do not divide the processes, or
    there is one.
    """
    tp, cp, pp = cuts
    with Ranks(device, timeout_s=timeout_s) as ranks:
        if ranks.world_size == 1:
            hint = "trainer launch --nproc-per-node 2 bench comm"
            raise UserError("one process has nobody to talk to", hint=hint)
        layout = ParallelLayout(tp=tp, cp=cp, pp=pp, dp=max(ranks.world_size // (tp * cp * pp), 1))
        if dp_shard and layout.dp % dp_shard:
            text = f"--dp-shard {dp_shard} does not divide the {layout.dp} ranks of dp"
            raise UserError(text, hint=f"trainer launch --nproc-per-node {ranks.world_size} bench comm --dp-shard 1")
        mesh = ProcessMesh(layout, ranks.rank, ranks.device, timeout_s=timeout_s, dp_shard=dp_shard)
        return rows_of_groups(ranks, mesh, sizes, repeats)


def rows_of_groups(
    ranks: Ranks, mesh: ProcessMesh, sizes: Sequence[float], repeats: int, before: Callable[[], object] = lambda: None
) -> list[Row]:
    """Return a row for each group of two or more ranks, each operation and each of the sizes in MiB."""
    return [
        Row(group, num_ranks, operation, num_bytes, timed(ranks, call, repeats, before))
        for num_bytes in (int(size * 2**20) for size in sizes)
        for num_ranks, group, operation, call in calls(mesh, num_bytes)
    ]


def calls(mesh: ProcessMesh, num_bytes: int) -> list[tuple[int, str, str, Callable[[], object]]]:
    """Return the number of ranks, the group's name, the operation and how to do it, in the same order on all ranks."""
    found: list[tuple[int, str, str, Callable[[], object]]] = []
    groups = [mesh.tp, mesh.cp, mesh.dp, *(group for group in mesh.nest((Axis.DP,)) if 1 < group.size < mesh.dp.size)]
    groups += [mesh.world] if mesh.world.size > max(group.size for group in groups) else []
    for group in (each for each in groups if each.size > 1):
        tensor = torch.zeros(-(-num_bytes // (4 * group.size)) * group.size, device=mesh.device)
        for name, how in OPERATIONS.items():
            found.append((group.size, group.name, name, partial(collect, group, name, tensor, *how)))
        found.append((group.size, group.name, "all_to_all", partial(exchange, group, tensor)))
    if mesh.layout.pp > 1:
        sent, received = torch.zeros(2, max(num_bytes // 4, 1), device=mesh.device)
        previous, following = mesh.activations.previous, mesh.activations.following
        found.append((2, "pp", "send", partial(pass_on, previous, following, sent, received)))
    return found


def collect(group: Group, operation: str, tensor: torch.Tensor, *how: str | int) -> None:
    """Make one collective call, and wait for it."""
    group.start(operation, tensor, *how).wait()


def exchange(group: Group, tensor: torch.Tensor) -> None:
    """Hand each rank its share, and wait for those of the others."""
    group.start_exchange(tensor).wait()


def pass_on(previous: Group | None, following: Group | None, sent: torch.Tensor, received: torch.Tensor) -> None:
    """Send to the next pipeline rank while the one before sends here."""
    works = [following.send(sent, to=1 - following.index)] if following is not None else []
    works += [previous.receive(received, source=1 - previous.index)] if previous is not None else []
    for work in works:
        work.wait()


def timed(ranks: Ranks, call: Callable[[], object], repeats: int, before: Callable[[], object] = lambda: None) -> float:
    """Return the median of the slowest rank's seconds; what is done `before` each call is not timed."""
    seconds = []
    for _ in range(WARM_UPS + repeats):
        before()
        begin = Moment(ranks.device)
        call()
        seconds.append(Moment(ranks.device).seconds_since(begin))
    return statistics.median(ranks.maximum(seconds)[WARM_UPS:])


def figure_of(rows: Sequence[Row]) -> Any:
    """Return a matplotlib figure of the bus bandwidths by size: a panel a group, a line an operation."""
    from matplotlib.figure import Figure

    groups = list(dict.fromkeys((row.group, row.num_ranks) for row in rows))
    figure = Figure(figsize=(4.5 * len(groups), 4), layout="constrained")
    for axes, (group, num_ranks) in zip(figure.subplots(1, len(groups), squeeze=False)[0], groups, strict=True):
        own = [row for row in rows if row.group == group]
        for operation in dict.fromkeys(row.operation for row in own):
            some = sorted((row for row in own if row.operation == operation), key=lambda row: row.num_bytes)
            sizes = [row.num_bytes / 2**20 for row in some]
            axes.plot(sizes, [row.bus_bytes_per_s / 1e9 for row in some], "o-", label=operation)
        axes.set(title=f"{group}, {num_ranks} ranks", xscale="log", xlabel="MiB", ylabel="bus GB/s", ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()
    return figure
