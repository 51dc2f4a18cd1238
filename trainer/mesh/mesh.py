"""ProcessMesh: a ParallelLayout made live, this rank's groups; passed as an argument, never fetched.

Every rank builds every group, in the same order. A group of one rank has no transport, so one process needs no
torch.distributed at all.
"""

from dataclasses import dataclass

import torch

from ckptkit import ParallelLayout
from threefold.errors import UserError
from trainer.config import Config
from trainer.config.resolve import kv_replicas, layout_of
from trainer.job.page import RankPage
from trainer.mesh.clock import Clock
from trainer.mesh.group import Group, Network
from trainer.mesh.layout import GROUPS, Axes, Axis, groups_needed, nested
from trainer.mesh.processes import Processes


@dataclass(frozen=True, slots=True)
class Links:
    """The groups that reach the pipeline ranks before and after, None at the pipeline's ends.

    If ranks hold several stages the last rank is before the first, by a group of their own.
    """

    previous: Group | None
    following: Group | None


class ProcessMesh:
    """Groups of this rank in a layout; `groups_needed` says who is in them. Those that nothing uses are not built.

    `activations` and `gradients` hold the links to the previous and the following pipeline rank, in each of which the
    lower rank has place 0.
    """

    def __init__(
        self,
        layout: ParallelLayout,
        rank: int,
        device: torch.device,
        *,
        timeout_s: float,
        kv_replicas: int = 1,
        dp_shard: int = 0,
        network: Network | None = None,
        page: RankPage | None = None,
    ) -> None:
        """Build the groups; a collective that the others do not join within `timeout_s` fails.

        `network` connects the ranks, by default the processes of torch.distributed. `page` is where calls are noted.
        """
        self._network = network or Processes(device, timeout_s=timeout_s)
        world_size = self._network.world_size
        if layout.world_size != world_size:
            raise UserError(
                f"layout {layout} needs {layout.world_size} processes, started are {world_size}",
                hint=f"trainer launch --nproc-per-node {layout.world_size} train ...",
            )
        self.layout, self.rank, self.device, self.page = layout, rank, device, page
        self.coords, self.clock = layout.coords(rank), Clock(device)
        self._needed = groups_needed(layout, kv_replicas, dp_shard)
        self._made: dict[tuple[tuple[int, ...], ...], list[Group]] = {}
        self.world, self.alone = self._group("world"), Group("alone", (rank,), 0, self.clock)
        self._along = {axes: self._group(name) for name, axes in GROUPS.items()}
        self.tp, self.kv, self.cp = (self._along[axis,] for axis in (Axis.TP, Axis.KV, Axis.CP))
        self.dp, self.ep = (self._along[axis,] for axis in (Axis.DP, Axis.EP))
        self.activations = self._links("activations")
        self.gradients = self._links("gradients")

    def along(self, axes: Axes) -> Group:
        """Return the group of the ranks that differ from this one along some axes only."""
        return self._along[axes]

    def place(self, axes: Axes, rank: int) -> int:
        """Return the place of a rank in its group along some axes."""
        return next(ranks.index(rank) for ranks in self._needed[".".join(axes)] if rank in ranks)

    def nest(self, axes: Axes) -> tuple[Group, Group]:
        """Return the group that cuts what the holders along some axes have, and that of its replicas."""
        inner, outer = nested(axes)
        return self._along[inner], self._along[outer] if outer else self.alone

    def _group(self, name: str) -> Group:
        """Build every group of a name and return this rank's; if it is in none, itself alone."""
        mine = self._connect(name)
        return mine[0] if mine else Group(name, (self.rank,), 0, self.clock, axes=GROUPS.get(name, ()))

    def _links(self, name: str) -> Links:
        """Build the links of a name; on GPUs send through each once, from the first pair of ranks to the last.

        NCCL connects two ranks at their first transfer and blocks both hosts until then. A schedule may begin a receive
        long before its neighbour sends, and the neighbour may wait for this rank.
        """
        groups, back = self._connect(name), self._connect(f"{name}_back")
        if self.device.type == "cuda":
            for group in [*groups, *back]:
                first = torch.zeros(1, device=self.device)
                (group.receive(first, 0) if group.index else group.send(first, 1)).wait()
        previous = [group for group in groups if group.index == 1] + [group for group in back if group.index == 0]
        following = [group for group in groups if group.index == 0] + [group for group in back if group.index == 1]
        return Links(next(iter(previous), None), next(iter(following), None))

    def _connect(self, name: str) -> list[Group]:
        """Build the groups of a name, or take those of another name that has the same ones.

        Calls of groups along axes come one after the other, so equal ones are one; but what a pass exchanges over cp,
        ep or kv does not wait behind sums and gathers beside it.
        """
        members, axes = tuple(self._needed[name]), GROUPS.get(name, ())
        is_alone = axes in ((Axis.CP,), (Axis.EP,), (Axis.KV,)) and len(members[0]) > 1
        if axes and not is_alone and members in self._made:
            return self._made[members]
        groups = []
        for ranks in members:
            transport = self._network.connect(name, ranks) if len(ranks) > 1 else None
            if self.rank in ranks:
                place = ranks.index(self.rank)
                calls = self.page.group(name, ranks) if self.page is not None and transport is not None else None
                groups.append(Group(name, ranks, place, self.clock, transport, axes, calls))
        if axes and not is_alone:
            self._made[members] = groups
        return groups


def mesh_of(
    config: Config, rank: int, device: torch.device, *, network: Network | None = None, page: RankPage | None = None
) -> ProcessMesh:
    """Return one rank's mesh of a resolved configuration."""
    layout, timeout_s = layout_of(config), config.parallel.timeout_s
    parts = {"kv_replicas": kv_replicas(config), "dp_shard": config.parallel.dp_shard}
    return ProcessMesh(layout, rank, device, timeout_s=timeout_s, network=network, page=page, **parts)
