"""Faults of replicas: of what groups of ranks that cut a bucket have in common, and of who owns which part of it."""

from typing import Any

import torch

from ckptkit.model.layout import ParallelLayout
from tests.trainer.support.faults import Fault, skipping, wrapping
from trainer.mesh.group import Group, Work
from trainer.store.bucket import Bucket
from trainer.store.plan import BucketPlan
from trainer.store.store import ParameterStore

DP4 = ParallelLayout(dp=4)


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


def nested_fault(name: str, plant: Any, zero_stage: int = 3) -> Fault:
    return Fault(name, DP4, plant, zero_stage, dp_shard=2)


NEST_FAULTS = [
    nested_fault("replicas do not get what others updated", skipping("all_gather", "replica")),
    nested_fault("replicas begin with what they own alone", wrapping(ParameterStore, "initialise", own_part_alone)),
    nested_fault("gradients are not summed over replicas", wrapping(Bucket, "_start_sum", own_replica_only)),
    nested_fault(
        "each micro-batch is summed over replicas",
        wrapping(Bucket, "start_reduce", lambda real, self, **ends: real(self)),
        2,
    ),
    nested_fault("gradients are summed over replicas twice", wrapping(Bucket, "finish_step", summed_twice)),
    nested_fault(
        "a rank owns the part of its replica",
        wrapping(BucketPlan, "interval", lambda real, self, size, index: real(self, size, index ^ 1)),
    ),
    nested_fault(
        "whole parameters are gathered before those of replicas", wrapping(Bucket, "_start_next", other_end_first), 2
    ),
]
