"""What a Function's backward says: its gradients have no gradients of their own."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd.function import once_differentiable

Backward = Callable[..., Any]


def differentiable_once(backward: Backward) -> Backward:
    """Mark a backward as `once_differentiable` does, whose guard is left out where no graph of gradients is asked for.

    There the guard changes nothing, and takes the host as long as the rest of a small backward.
    """
    guarded = once_differentiable(backward)

    @wraps(backward)
    def either(ctx: Any, *gradients: Any) -> Any:
        return guarded(ctx, *gradients) if torch.is_grad_enabled() else backward(ctx, *gradients)

    return either
