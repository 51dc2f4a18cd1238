"""AdamW on the owned intervals, and the learning-rate schedule.

Sources: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019) and "SGDR" (2017).
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch.optim.adamw import adamw

from trainer.bucket import Bucket, Segment
from trainer.config import OptimConfig


def learning_rate(optim: OptimConfig, step: int) -> float:
    """Rate of the step after `step` steps: linear warm-up, then a cosine from lr to min_lr at decay_steps."""
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    span = max(optim.decay_steps - optim.warmup_steps, 1)
    progress = min((step - optim.warmup_steps) / span, 1.0)
    return optim.min_lr + (optim.lr - optim.min_lr) * 0.5 * (1 + math.cos(math.pi * progress))


@torch.no_grad()
def update(buckets: Sequence[Bucket], optim: OptimConfig, step: int, decays: Callable[[str], bool]) -> float:
    """Make one AdamW step on the owned intervals, in place, after `step` steps; return the learning rate used."""
    lr = learning_rate(optim, step)
    for weight_decay, has_decay in ((optim.weight_decay, True), (0.0, False)):
        owned = [(b, s) for b in buckets for s in b.segments if decays(s.name) == has_decay]
        if owned:
            _adamw(owned, optim, step, lr, weight_decay)
    return lr


def _adamw(
    owned: Sequence[tuple[Bucket, Segment]], optim: OptimConfig, step: int, lr: float, weight_decay: float
) -> None:
    device = owned[0][0].master.device
    adamw(
        [segment.of(bucket.master) for bucket, segment in owned],
        [segment.of(bucket.owned_gradients) for bucket, segment in owned],
        [segment.of(bucket.exp_avg) for bucket, segment in owned],
        [segment.of(bucket.exp_avg_sq) for bucket, segment in owned],
        [],
        list(torch.full((len(owned),), float(step), device=device).unbind()),
        fused=True,
        amsgrad=False,
        beta1=optim.beta1,
        beta2=optim.beta2,
        lr=lr,
        weight_decay=weight_decay,
        eps=optim.eps,
        maximize=False,
    )
