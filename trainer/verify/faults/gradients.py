"""Faults of gradients: of their sums over data-parallel ranks, over micro-batches, and of what they are clipped by."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from trainer.engine import Engine
from trainer.linear.weight import Weight
from trainer.mesh.group import Group
from trainer.ops import cross_entropy
from trainer.store import plan
from trainer.store.bucket import Bucket
from trainer.store.store import ParameterStore
from trainer.verify.faults.fault import DP, WEIGHTS, Fault
from trainer.verify.faults.planting import Patch, read_at_once, skipping, wrapping


def own_first_sample(real: Any, self: Engine, step: int, batch: Any, **options: Any) -> Any:
    found = real(self, step, batch, **options)
    size = self.config.train.micro_batch_size
    length = self.config.train.seq_length
    firsts = range(batch.first_sample * length, 10**9, size * length)
    return [replace(each, runs=(range(first, first + size * length),)) for each, first in zip(found, firsts)]


def shifted_positions(real: Any, self: Engine, step: int, batch: Any, **options: Any) -> Any:
    seq, index = self.config.train.seq_length, self.mesh.dp.index
    return [replace(each, positions_S=(each.positions_S + index) % seq) for each in real(self, step, batch, **options)]


def averaged(real: Any, self: Any) -> None:
    real(self)
    self.gradients.div_(self.group.size)


def own_norm(real: Any, self: Group, tensor: torch.Tensor, *args: Any) -> torch.Tensor:
    own = tensor.clone()
    found = real(self, tensor, *args)
    if self.name == "world" and self.size > 1:
        found[1:] = own[1:]
    return found


def overwriting(real: Any, self: Weight, compute: Callable[[torch.Tensor, bool], object], **ends: bool) -> None:
    real(self, lambda out, first: compute(out, True), **ends)


def not_zeroed(real: Any, self: Weight) -> None:
    self._num_ended = 0


def neighbours_interval(real: Any, total: int, size: int, index: int, itemsize: int) -> Any:
    return real(total, size, (index + 1) % size, itemsize)


def own_means(real: Any, self: Engine, name: str, batches: Any, reduce_loss: Any) -> torch.Tensor:
    def reduce(losses: torch.Tensor, batch: Any) -> torch.Tensor:
        return (losses * batch.loss_mask_S).sum() / batch.loss_mask_S.sum().clamp(min=1) / len(batches)

    return real(self, name, batches, reduce)


def doubled(real: Any, self: Weight, compute: Callable[[torch.Tensor, bool], object], **ends: bool) -> None:
    """Double what is there before each micro-batch but the first adds its own."""

    def add(out: torch.Tensor, first: bool) -> object:
        if not first:
            out.mul_(2)
        return compute(out, first)

    real(self, add, **ends)


def equal_microbatches(real: Any, self: Engine, name: str, batches: Any, reduce_loss: Any) -> torch.Tensor:
    """Return the mean of the micro-batches' means, whatever number of tokens each has."""

    def reduce(losses: torch.Tensor, batch: Any) -> torch.Tensor:
        mean = (losses * batch.loss_mask_S).sum() / batch.loss_mask_S.sum().clamp(min=1)
        return mean / (len(batches) * self.mesh.dp.size)

    return real(self, name, batches, reduce if name != "forward" else reduce_loss)


def clipped_first(real: Any, self: Bucket, **ends: bool) -> None:
    """Clip each bucket by its norm on this rank, before the sum."""
    norm = self._whole_gradients.nan_to_num().norm()  # padding may hold anything
    self._whole_gradients.mul_(0.05 / norm.clamp(min=0.05))
    real(self, **ends)


def summed_norms(real: Any, self: ParameterStore) -> torch.Tensor:
    """Count the squared norm on each rank that has the same sums."""
    return real(self) * self.mesh.dp.size


def dropout_by_rank(real: Any, self: Engine, step: int, batch: Any, **options: Any) -> Any:
    parts = real(self, step, batch, **options)
    keys = [part.dropout and replace(part.dropout, seed=part.dropout.seed + self.mesh.dp.index) for part in parts]
    return [replace(part, dropout=key) for part, key in zip(parts, keys, strict=True)]


def stale_mask(patch: Patch) -> None:
    """Let each step have the loss mask of the step before."""
    before = dict[int, torch.Tensor]()

    def start_step(real: Any, self: Engine, step: int, batch: Any, **options: Any) -> Any:
        mask = before.get(id(self), batch.loss_mask)
        before[id(self)] = batch.loss_mask
        return real(self, step, replace(batch, loss_mask=mask), **options)

    wrapping(Engine, "start_step", start_step)(patch)


def labels_as_tokens(real: Any, self: Engine, step: int, batch: Any, **options: Any) -> Any:
    """Let each token be its own label."""
    return real(self, step, replace(batch, labels=batch.tokens), **options)


PADDED: dict[str, Any] = {"data": {"packing": "pad"}}  # rows with other numbers of tokens

GRADIENT_FAULTS = (
    Fault("averaged-over-dp", "gradients are averaged over dp", DP, wrapping(Bucket, "finish_reduce", averaged)),
    Fault(
        "not-summed-zero-0",
        "gradients are not summed over dp, zero_stage 0",
        DP,
        wrapping(Bucket, "start_reduce", lambda real, self: None),
        zero_stage=0,
    ),
    Fault(
        "sums-read-early",
        "gradients are read before their sum is there",
        DP,
        read_at_once("reduce_scatter", "dp"),
        peer="NVIDIA/Megatron-LM#7400",
    ),
    Fault(
        "parameters-read-early",
        "parameters are read before they are gathered",
        DP,
        wrapping(Bucket, "arrive", lambda real, self: None),
    ),
    Fault("not-summed-zero-1", "gradients are not summed over dp, zero_stage 1", DP, skipping("reduce_scatter", "dp")),
    Fault("parameters-not-gathered", "new parameters are not gathered over dp", DP, skipping("all_gather", "dp")),
    Fault(
        "neighbours-interval",
        "a rank updates its neighbour's interval",
        DP,
        wrapping(plan, "shard_interval", neighbours_interval),
        check=WEIGHTS,
    ),
    Fault("tokens-counted-per-rank", "tokens are counted on this rank alone", DP, skipping("all_reduce", "dp")),
    Fault(
        "mean-of-means",
        "the loss is the mean of the micro-batches' means on each rank",
        DP,
        wrapping(Engine, "_run", own_means),
    ),
    Fault(
        "microbatches-weigh-the-same",
        "micro-batches weigh the same, whatever number of tokens they have",
        None,
        wrapping(Engine, "_run", equal_microbatches),
        **PADDED,
    ),
    Fault(
        "microbatches-overwrite",
        "each micro-batch's gradients replace those before",
        DP,
        wrapping(Weight, "add_gradient", overwriting),
    ),
    Fault(
        "gradients-doubled",
        "gradients are doubled at each further micro-batch",
        None,
        wrapping(Weight, "add_gradient", doubled),
        peer="NVIDIA/Megatron-LM#6660",
    ),
    Fault(
        "dropout-by-dp-sample",
        "dropout numbers samples within a rank",
        DP,
        wrapping(Engine, "_microbatches", own_first_sample),
    ),
    Fault(
        "dropout-by-dp-rank",
        "the key of dropout depends on the dp rank",
        DP,
        wrapping(Engine, "_microbatches", dropout_by_rank),
    ),
    Fault(
        "positions-by-rank",
        "positions are shifted by the dp rank",
        DP,
        wrapping(Engine, "_microbatches", shifted_positions),
    ),
    Fault("clip-by-rank", "gradients are clipped by the rank's own norm", DP, wrapping(Group, "all_reduce", own_norm)),
    Fault(
        "clip-before-the-sum",
        "gradients are clipped on each rank before they are summed",
        DP,
        wrapping(Bucket, "start_reduce", clipped_first),
    ),
    Fault(
        "norm-counted-per-dp-rank",
        "the squared norm counts the same sums on every dp rank",
        DP,
        wrapping(ParameterStore, "finish_reduce", summed_norms),
        zero_stage=0,
    ),
    Fault(
        "gradients-not-zeroed",
        "gradients are not zeroed between steps",
        None,
        wrapping(Weight, "begin_sum", not_zeroed),
    ),
    Fault(
        "cap-without-slope",
        "the gradient of a capped logit is handed on as that of the logit",
        None,
        wrapping(cross_entropy, "slopes", lambda real, y, cap: torch.ones_like(real(y, cap))),
        model={"logit_softcap": 0.5},
    ),
    Fault("stale-loss-mask", "a step has the loss mask of the step before", None, stale_mask, **PADDED),
    Fault("labels-not-shifted", "each token is its own label", None, wrapping(Engine, "start_step", labels_as_tokens)),
)
