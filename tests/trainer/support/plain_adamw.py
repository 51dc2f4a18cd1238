"""AdamW in plain torch, which the native one is compared with."""

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.config import OptimConfig
from trainer.ops.adamw import Interval


@torch.no_grad()
def adamw_reference(
    intervals: Sequence[Interval], optim: OptimConfig, lr: float, step: int, *, factor: Tensor, is_bad: Tensor
) -> None:
    """Make the step of `IntervalTable.adamw` in plain torch."""
    if is_bad:
        return
    correction1, correction2 = (1 - beta ** (step + 1) for beta in (optim.beta1, optim.beta2))
    for interval in intervals:
        gradient = interval.gradient * factor.to(interval.gradient.dtype)
        exp_avg, exp_avg_sq = interval.exp_avg.to(gradient.dtype), interval.exp_avg_sq.to(gradient.dtype)
        exp_avg.lerp_(gradient, 1 - optim.beta1)
        exp_avg_sq.mul_(optim.beta2).addcmul_(gradient, gradient, value=1 - optim.beta2)
        interval.master.mul_(1 - lr * optim.weight_decay * interval.decays)
        root = exp_avg_sq.sqrt() / correction2**0.5
        interval.master.addcdiv_(exp_avg, root.add_(optim.eps), value=-lr / correction1)
        interval.exp_avg.copy_(exp_avg)
        interval.exp_avg_sq.copy_(exp_avg_sq)
        if interval.published is not None:
            interval.published.copy_(interval.master)
