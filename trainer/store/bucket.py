"""Bucket: one flat buffer of parameters with their gradients, and the optimizer state that this rank keeps of it."""

import torch

from trainer.mesh.group import Group
from trainer.ops.adamw import Interval
from trainer.ops.dtypes import wide_dtype
from trainer.store.plan import BucketPlan, Segment


class Bucket:
    """One flat buffer of parameters; owned by the training thread.

    `parameters` and `gradients` cover the padded bucket. `master`, `exp_avg` and `exp_avg_sq` cover what this rank
    updates, the moments in the dtype `moments`, the others in the wide one: the owned interval if `sharded`, else all
    of it. If the parameters have the wide dtype themselves, `master` is a view of them. Without an optimizer there are
    no gradients, no moments and no copies.
    """

    def __init__(
        self,
        plan: BucketPlan,
        dtype: torch.dtype,
        device: torch.device,
        group: Group,
        *,
        sharded: bool,
        moments: torch.dtype,
        with_optimizer: bool,
    ) -> None:
        self.plan, self.group, self.sharded = plan, group, sharded
        size, wide = plan.size(group.size), wide_dtype(dtype)
        self.owned = plan.interval(group.size, group.index)
        self.updated = self.owned if sharded else (0, size)
        self.parameters = torch.zeros(size, dtype=dtype, device=device)
        updated = self.parameters[slice(*self.updated)]
        has_copy = with_optimizer and dtype != wide
        self.master = torch.zeros_like(updated, dtype=wide) if has_copy else updated
        self.gradients = torch.zeros(size if with_optimizer else 0, dtype=wide, device=device)
        self.exp_avg = torch.zeros_like(self.master if with_optimizer else self.master[:0], dtype=moments)
        self.exp_avg_sq = torch.zeros_like(self.exp_avg)
        self.owned_segments = plan.segments(*self.owned)
        self.updated_segments = plan.segments(*self.updated)

    @property
    def state_bytes(self) -> int:
        """Return the bytes of optimizer state on this rank: the moments, and the master if it is a copy."""
        master = self.master if self.master.dtype != self.parameters.dtype else self.master[:0]
        return sum(state.numel() * state.itemsize for state in (self.exp_avg, self.exp_avg_sq, master))

    def reduce_gradients(self) -> None:
        """Sum the gradients over the holders; at least the part that this rank updates is valid afterwards."""
        if self.sharded:
            self.group.reduce_scatter(self.gradients)
        else:
            self.group.all_reduce(self.gradients)

    def interval(self, segment: Segment, first: int, *, decays: bool, row: int) -> Interval:
        """Return a segment of the interval from position `first` on, with the state that this rank has of it."""
        start = first + segment.offset
        live = slice(start, start + segment.stop - segment.start)
        state = slice(live.start - self.updated[0], live.stop - self.updated[0])
        moments = (self.exp_avg[state], self.exp_avg_sq[state])
        published = self.parameters[live] if self.master.dtype != self.parameters.dtype else None
        return Interval(self.gradients[live], *moments, self.master[state], published, decays, row)

    def round_masters(self) -> None:
        """Round the masters on this rank to its parameters; an update does so itself."""
        if self.master.dtype != self.parameters.dtype:
            self.parameters[slice(*self.updated)].copy_(self.master)

    def all_gather_parameters(self) -> None:
        """Bring the parameters of every holder up to date with those of their owners."""
        if self.sharded:
            self.group.all_gather(self.parameters)
