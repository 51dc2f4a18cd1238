"""RMSNorm (the fused op) and LayerNorm over the last dim, which hand the gradients of their weights to the store."""

from typing import Any

import torch
from torch import Tensor

from trainer.config import ModelConfig
from trainer.linear.weight import Weight, add_or_write
from trainer.ops.dtypes import wide_dtype
from trainer.ops.rmsnorm import add_rms_norm
from trainer.store.store import ParameterStore


class Norm:
    """RMSNorm, or LayerNorm if the model asks for it."""

    def __init__(self, model: ModelConfig, store: ParameterStore, name: str) -> None:
        self.eps = model.norm_eps
        self.weight, self.bias = store.weight(f"{name}.weight"), store.weight_if_any(f"{name}.bias")

    def __call__(self, x: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the norm of the sum of the residual stream x and a branch, if there is one, and that sum.

        The norm is that of the rounded sum: it has the same bits if the sum comes from another stage.
        """
        if self.bias is not None:
            x = x if branch is None else x + branch
            return _LayerNorm.apply(x, self.weight, self.bias, self.eps), x
        weight, epoch = self.weight, self.weight.epoch

        def take_gradient(gradient: Tensor) -> None:
            weight.check(epoch)
            weight.add_gradient(add_or_write(gradient))

        return add_rms_norm(x, branch, weight.values, self.eps, take_gradient)


class _LayerNorm(torch.autograd.Function):
    """The weights go to torch in the wide dtype, so that it sums their gradients there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Weight, bias: Weight, eps: float) -> Tensor:
        x = x.contiguous()
        wide = _wide(x, weight, bias)
        y, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], *wide, eps)
        ctx.save_for_backward(x, mean, rstd)
        ctx.weight, ctx.bias, ctx.epoch = weight, bias, weight.epoch
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        x, mean, rstd = ctx.saved_tensors
        ctx.weight.check(ctx.epoch)
        wide = _wide(x, ctx.weight, ctx.bias)
        dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
            dy.contiguous(), x, x.shape[-1:], mean, rstd, *wide, [True, True, True]
        )
        ctx.weight.add_gradient(add_or_write(dweight))
        ctx.bias.add_gradient(add_or_write(dbias))
        return dx, None, None, None


def _wide(x: Tensor, weight: Weight, bias: Weight) -> tuple[Tensor, Tensor]:
    dtype = x.dtype if x.is_cuda else wide_dtype(x.dtype)  # torch's CUDA kernel takes one dtype, and rounds a sum once
    return weight.values.to(dtype), bias.values.to(dtype)
