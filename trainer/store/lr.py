"""The learning-rate schedule: a linear warm-up, then a cosine (Loshchilov and Hutter, "SGDR", 2017)."""

import math

from trainer.config import OptimConfig


def learning_rate(optim: OptimConfig, step: int) -> float:
    """Return the rate of the step after `step` steps: linear warm-up, then a cosine from lr to min_lr at decay_steps.

    For example with warmup_steps 10 the first step has a tenth of lr.
    """
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    span = max(optim.decay_steps - optim.warmup_steps, 1)
    progress = min((step - optim.warmup_steps) / span, 1.0)
    return optim.min_lr + (optim.lr - optim.min_lr) * 0.5 * (1 + math.cos(math.pi * progress))
