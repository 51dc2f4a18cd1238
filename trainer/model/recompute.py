"""Recompute: a block's activations are made again in the backward instead of being kept (Chen et al., 2016)."""

from typing import Any

import torch
from torch import Tensor

from trainer.model.block import Block
from trainer.model.microbatch import MicroBatch


def recompute(block: Block, x_TD: Tensor, branch_TD: Tensor | None, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Return block(x, branch, batch), of which only the sum of x and branch is kept for the backward.

    Nothing random needs to be kept: dropout masks are a function of a token's place.
    """
    return _Recompute.apply(x_TD, branch_TD, block, batch)


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, branch_TD: Tensor | None, block: Block, batch: MicroBatch
    ) -> tuple[Tensor, Tensor]:
        h_TD, x_TD = block.norm1(x_TD, branch_TD)
        ctx.save_for_backward(x_TD)
        ctx.block, ctx.batch = block, batch
        return block.after_norm(h_TD, x_TD, batch)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x_TD,) = ctx.saved_tensors
        x_TD = x_TD.detach().requires_grad_()
        with torch.enable_grad():
            outputs = ctx.block(x_TD, None, ctx.batch)
        torch.autograd.backward(outputs, gradients)
        return x_TD.grad, x_TD.grad if ctx.needs_input_grad[1] else None, None, None
