"""ProcessMesh: a ParallelLayout made live, this rank's process groups; passed as an argument, never fetched.

Every rank builds every group, in the same order. A group of one rank holds no handle and its collectives do nothing, so
one process needs no torch.distributed at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist

from ckptkit import Coords, ParallelLayout
from threefold.errors import UserError
from trainer.clock import Clock

# torch 2.13 renames both
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks along one axis; `index` is this rank's place among `ranks`."""

    ranks: tuple[int, ...]
    index: int
    handle: dist.ProcessGroup | None
    clock: Clock

    @property
    def size(self) -> int:
        return len(self.ranks)

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        """Reduce in place over the group and return the tensor."""
        if self.handle is not None:
            with self.clock.span("comm"):
                dist.all_reduce(tensor, op=op, group=self.handle)
        return tensor

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Overwrite in place with the tensor of the rank at place `source`, and return it."""
        if self.handle is not None:
            with self.clock.span("comm"):
                dist.broadcast(tensor, src=self.ranks[source], group=self.handle)
        return tensor

    def reduce_scatter(self, flat: torch.Tensor) -> None:
        """Sum a flat buffer over the group; afterwards this rank's equal share of it holds the sum."""
        if self.handle is None:
            return
        with self.clock.span("comm"):
            if flat.is_cuda:
                share = flat.chunk(self.size)[self.index]
                _reduce_scatter(share, flat, group=self.handle)
            else:  # gloo's all-reduce is 2-3 times as fast as its reduce-scatter, with equal bits
                dist.all_reduce(flat, group=self.handle)

    def all_gather(self, flat: torch.Tensor) -> None:
        """Fill a flat buffer from the equal shares that the ranks hold of it."""
        if self.handle is not None:
            with self.clock.span("comm"):
                _all_gather(flat, flat.chunk(self.size)[self.index].clone(), group=self.handle)


class ProcessMesh:
    """Groups of this rank along the axes of a layout.

    `tp`, `dp`, `pp` run along one axis; `ends` joins the first and the last stage (tied embeddings); `world` is all.
    `activations` and `gradients` are the links to the next and from the previous stage: two groups a pair of stages,
    since opposite directions on one NCCL communicator would wait for each other.
    """

    def __init__(self, layout: ParallelLayout, rank: int, device: torch.device, *, timeout_s: float) -> None:
        """Build the groups; a collective that the others do not join within `timeout_s` fails."""
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        if layout.world_size != world_size:
            raise UserError(
                f"layout {layout} needs {layout.world_size} processes, started are {world_size}",
                hint=f"torchrun --nproc-per-node {layout.world_size} -m trainer train ...",
            )
        self.layout, self.rank, self.device = layout, rank, device
        self.coords = layout.coords(rank)
        self.clock, self._timeout = Clock(device), timedelta(seconds=timeout_s)
        self.world = self._group([tuple(range(world_size))])
        self.tp = self._along("tp")
        self.dp = self._along("dp")
        self.pp = self._along("pp")
        columns = self._columns("pp")
        self.ends = self._group([tuple(dict.fromkeys((column[0], column[-1]))) for column in columns])
        links = [pair for column in columns for pair in pairwise(column)]
        self.activations = self._links(links)
        self.gradients = self._links(links)

    @property
    def is_first_stage(self) -> bool:
        return self.coords.pp == 0

    @property
    def is_last_stage(self) -> bool:
        return self.coords.pp == self.layout.pp - 1

    def _columns(self, axis: str) -> list[tuple[int, ...]]:
        """Return all sets of ranks that differ in one axis only."""
        columns: dict[Coords, list[int]] = {}
        for rank in range(self.layout.world_size):
            columns.setdefault(replace(self.layout.coords(rank), **{axis: 0}), []).append(rank)
        return [tuple(column) for column in columns.values()]

    def _along(self, axis: str) -> Group:
        return self._group(self._columns(axis))

    def _group(self, columns: Sequence[tuple[int, ...]]) -> Group:
        """Build every group of `columns` and return this rank's; where it is in none, itself alone."""
        mine = Group((self.rank,), 0, None, self.clock)
        for column in columns:
            handle = self._handle(column) if len(column) > 1 else None
            if self.rank in column:
                mine = Group(column, column.index(self.rank), handle, self.clock)
        return mine

    def _links(self, pairs: Sequence[tuple[int, int]]) -> "Links":
        previous = following = None
        for pair in pairs:
            handle = self._handle(pair)
            if self.rank == pair[1]:
                previous = Link(pair[0], handle)
            elif self.rank == pair[0]:
                following = Link(pair[1], handle)
        return Links(previous, following)

    def _handle(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """Build one group; without a timeout of its own it would have torch's default, not the job's."""
        return dist.new_group(list(ranks), timeout=self._timeout)


@dataclass(frozen=True, slots=True)
class Link:
    """A neighbouring stage's rank and the group that reaches it."""

    peer: int
    handle: dist.ProcessGroup


@dataclass(frozen=True, slots=True)
class Links:
    """The neighbours of this rank along the pipeline, None at its ends."""

    previous: Link | None
    following: Link | None
