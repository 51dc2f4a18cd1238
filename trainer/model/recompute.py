"""Recompute: a block's activations are made again in the backward instead of being kept (Chen et al., 2016)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainer.model.microbatch import MicroBatch

Layer = Callable[[Tensor, MicroBatch], Tensor]


def recompute(block: Layer, x_TD: Tensor, batch: MicroBatch) -> Tensor:
    """Return block(x, batch), of which only x is kept for the backward.

    Nothing random needs to be kept: dropout masks are a function of a token's place.
    """
    return _Recompute.apply(x_TD, block, batch)


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, block: Layer, batch: MicroBatch) -> Tensor:
        ctx.save_for_backward(x_TD)
        ctx.block, ctx.batch = block, batch
        return block(x_TD, batch)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, None, None]:
        (x_TD,) = ctx.saved_tensors
        x_TD = x_TD.detach().requires_grad_()
        with torch.enable_grad():
            y_TD = ctx.block(x_TD, ctx.batch)
        torch.autograd.backward(y_TD, dy_TD)
        return x_TD.grad, None, None
