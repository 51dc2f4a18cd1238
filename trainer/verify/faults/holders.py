"""Faults of who holds a parameter, and of who owns which part of it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ckptkit import ParallelLayout
from trainer.mesh.group import Group, Work
from trainer.mesh.layout import GROUPS, OVER_DATA, Axes
from trainer.model import table
from trainer.store.bucket import Bucket
from trainer.store.plan import BucketPlan
from trainer.store.store import ParameterStore
from trainer.verify.faults.fault import EXPERTS, TP, Fault
from trainer.verify.faults.planting import Patch, skipping, wrapping

DP4 = ParallelLayout(dp=4)


def held_apart(name: str) -> Callable[[Patch], None]:
    """Let the holders along the axes of a name be the data-parallel ranks alone."""

    def held_axes(real: Any, *args: Any, **options: Any) -> Axes:
        axes: Axes = real(*args, **options)
        return OVER_DATA if axes == GROUPS[name] else axes

    return wrapping(table, "holders", held_axes)


def own_replica_only(real: Any, self: Bucket, group: Group, gradients: torch.Tensor) -> Work:
    return Work(group, "reduce_scatter", gradients, None) if group is self.outer else real(self, group, gradients)


def summed_twice(real: Any, self: Bucket) -> None:
    self.finish_reduce()
    is_nested = self._reducing_outer is not None
    real(self)
    if is_nested:
        self._reducing_outer = self._start_sum(self.outer, self.gradients)
        real(self)


def own_part_alone(real: Any, self: ParameterStore, seed: int) -> None:
    real(self, seed)
    for bucket in self.buckets:
        own = bucket.owned[0] - bucket.kept[0], bucket.owned[1] - bucket.kept[0]
        if bucket.cuts_parameters:
            bucket.parameters[: own[0]].zero_()
            bucket.parameters[own[1] :].zero_()


def other_end_first(real: Any, self: Bucket) -> None:
    self._to_gather.reverse()
    real(self)


HOLDER_FAULTS = (
    Fault(
        "norms-held-apart",
        "norms are left out of their holders on other tp ranks",
        TP,
        held_apart("tp.cp.dp"),
        cuts_tokens=True,
    ),
    Fault(
        "heads-held-apart",
        "heads that two tp ranks hold are left out of their holders",
        ParallelLayout(tp=4),
        held_apart("kv.cp.dp"),
    ),
    Fault(
        "experts-summed-over-dp",
        "gradients of experts are summed over dp",
        ParallelLayout(ep=2, dp=4),
        held_apart("edp"),
        model=EXPERTS,
    ),
)

REPLICA_FAULTS = tuple(
    replace(fault, dp_shard=2)
    for fault in (
        Fault(
            "replicas-not-updated", "replicas do not get what others updated", DP4, skipping("all_gather", "replica"), 3
        ),
        Fault(
            "replicas-begin-apart",
            "replicas begin with what they own alone",
            DP4,
            wrapping(ParameterStore, "initialise", own_part_alone),
            3,
        ),
        Fault(
            "replicas-not-summed",
            "gradients are not summed over replicas",
            DP4,
            wrapping(Bucket, "_start_sum", own_replica_only),
            3,
        ),
        Fault(
            "replicas-summed-each-pass",
            "each micro-batch is summed over replicas",
            DP4,
            wrapping(Bucket, "start_reduce", lambda real, self, **ends: real(self)),
            2,
        ),
        Fault(
            "replicas-summed-twice",
            "gradients are summed over replicas twice",
            DP4,
            wrapping(Bucket, "finish_step", summed_twice),
            3,
        ),
        Fault(
            "part-of-the-replica",
            "a rank owns the part of its replica",
            DP4,
            wrapping(BucketPlan, "interval", lambda real, self, size, index: real(self, size, index ^ 1)),
            3,
        ),
        Fault(
            "gathers-swapped",
            "whole parameters are gathered before those of replicas",
            DP4,
            wrapping(Bucket, "_start_next", other_end_first),
            2,
        ),
    )
)
