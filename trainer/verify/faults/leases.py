"""Faults of what ZeRO stages 2 and 3 lease: content out of date, sums that begin early, end late or get lost."""

from collections.abc import Callable
from typing import Any

import torch

from ckptkit import ParallelLayout
from trainer.store import bucket
from trainer.store.bucket import Bucket
from trainer.store.leases import Lease, Leases
from trainer.store.plan import BucketPlan
from trainer.store.residence import Residence
from trainer.store.unit import Border
from trainer.verify.faults.fault import DP, Fault
from trainer.verify.faults.planting import Patch, skipping, wrapping


def added_always(real: Any, gradient: torch.Tensor) -> Callable[[torch.Tensor, bool], object]:
    return lambda out, first: out.add_(gradient)


def written_always(real: Any, gradient: torch.Tensor) -> Callable[[torch.Tensor, bool], object]:
    return lambda out, first: out.copy_(gradient)


def never_late(patch: Patch) -> None:
    patch.setattr(Bucket, "late", property(lambda self: []))


def gathering_a_neighbour(real: Any, self: Residence) -> None:
    """Its own weights find what another block's are."""
    other = next((each for each in (self.following, self.previous) if each is not None), self)
    size = [each.plan.size(each.group.size) for each in self._gathered]
    if size == [each.plan.size(each.group.size) for each in other._gathered]:
        for own, others in zip(self._gathered, other._gathered, strict=True):
            own.parameters, others.parameters = others.parameters, own.parameters
        real(self)
        for own, others in zip(self._gathered, other._gathered, strict=True):
            own.parameters, others.parameters = others.parameters, own.parameters


def released_at_once(patch: Patch) -> None:
    """Let what was returned be somebody else's."""

    def forward(real: Any, self: Border) -> None:
        real(self)
        if self.after is not None:
            self.after.release()

    def give_back(real: Any, self: Leases, lease: Lease) -> None:
        lease.settle()
        lease.memory.fill_(torch.nan)
        real(self, lease)

    wrapping(Border, "forward", forward)(patch)
    wrapping(Leases, "give_back", give_back)(patch)


LEASE_FAULTS = (
    Fault(
        "gathered-stale",
        "gathered parameters are of the step before",
        DP,
        wrapping(Leases, "forget", lambda real, self: None),
        3,
    ),
    Fault(
        "wrong-block-ahead",
        "the wrong block is gathered ahead",
        DP,
        wrapping(Residence, "prefetch", gathering_a_neighbour),
        3,
    ),
    Fault(
        "released-early",
        "parameters are released before they are read",
        DP,
        released_at_once,
        3,
        trips="was read outside of the passes",
    ),
    Fault("cut-not-gathered", "parameters that are cut are not gathered", DP, skipping("all_gather", "dp"), 3),
    Fault("pass-sum-begins-early", "the sum of a pass begins with the first gradient", DP, never_late, 2),
    Fault(
        "pass-sum-overwrites",
        "the sum of a micro-batch is written over that of the one before",
        DP,
        wrapping(bucket, "add_or_write", written_always),
        2,
    ),
    Fault(
        "step-sum-added",
        "the sum of a step's first micro-batch is added to the last step's",
        DP,
        wrapping(bucket, "add_or_write", added_always),
        2,
    ),
    Fault(
        "leased-before-sum-ended",
        "memory is leased again before its sum has ended",
        DP,
        wrapping(Lease, "settle", lambda real, self: None),
        2,
    ),
    Fault(
        "two-stages-cut",
        "a matrix that two stages hold is cut",
        ParallelLayout(pp=2, dp=2),
        wrapping(BucketPlan, "is_cut", lambda real, self, num_holders, *others: num_holders > 1),
        3,
    ),
)
