"""The learning rate of a step: a linear warm-up, then a schedule, until a cool-down takes over.

Sources: Loshchilov and Hutter, "SGDR", 2017 (cosine); Vaswani et al., "Attention Is All You Need", 2017 (inverse-sqrt);
Hu et al., "MiniCPM", 2024 (wsd); Haegele et al., "Scaling Laws and Compute-Optimal Training Beyond Fixed Training
Durations", 2024 (cool-downs, and their shape 1 - sqrt).
"""

import math

from trainer.config import OptimConfig
from trainer.config.optim import Shape


def learning_rate(optim: OptimConfig, step: int) -> float:
    """Return the rate of the step after `step` steps, for example with warmup_steps 10 a tenth of lr for the first."""
    first, span = optim.cool_down_from, optim.cool_down_steps
    if span <= 0 or step < first:
        return scheduled_rate(optim, step)
    start = optim.cool_down_lr or scheduled_rate(optim, first)
    return fallen(start, min(optim.min_lr, start), optim.wsd_decay, (step - first) / span)


def scheduled_rate(optim: OptimConfig, step: int) -> float:
    """Return the same without the cool-down: the warm-up reaches lr, and at decay_steps all but constant have min_lr.

    For example wsd with decay_steps 100 and wsd_decay_steps 20 has lr until step 80, and with the shape linear the mean
    of lr and min_lr at step 90.
    """
    warmup, end, kind = optim.warmup_steps, optim.decay_steps, optim.schedule
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    if kind == "constant":
        return optim.lr
    if kind == "inverse-sqrt":
        rate = optim.lr * math.sqrt(max(warmup, 1)) / math.sqrt(max(step, 1))
        return max(optim.min_lr, rate) if step <= end else optim.min_lr
    first = end - optim.wsd_decay_steps if kind == "wsd" else warmup
    shape: Shape = optim.wsd_decay if kind == "wsd" else "linear" if kind == "linear" else "cosine"
    return fallen(optim.lr, optim.min_lr, shape, (step - first) / max(end - first, 1))


def fallen(start: float, end: float, shape: Shape, way: float) -> float:
    """Return the rate at a part of the way from `start` to `end`; before 0 and behind 1 it stays."""
    way = min(max(way, 0.0), 1.0)
    match shape:
        case "linear":
            left = 1 - way
        case "sqrt":
            left = 1 - math.sqrt(way)
        case "cosine":
            left = 0.5 * (1 + math.cos(math.pi * way))
        case "exponential":
            left = 2 * 0.5**way - 1
    return end + (start - end) * left
