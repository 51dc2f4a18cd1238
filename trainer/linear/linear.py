"""Linear: y = x W^T + b, whose backward hands the gradients of W and b to the weight itself.

x is saved for the backward, nothing of W is. The product for the gradient of W is accumulated in the wide dtype.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.linear.gemm import add_bias_gradient, add_product
from trainer.linear.weight import Weight


def linear(x_TK: Tensor, weight: Weight, bias: Weight | None = None) -> Tensor:
    """Return x W^T + b, [T, N], for a weight [N, K].

    While gradients are recorded x must require one: else the backward, and with it the gradient of W, would be lost.
    """
    return split_linear(x_TK, weight, bias, 1)[0]


def split_linear(x_TK: Tensor, weight: Weight, bias: Weight | None, num_parts: int) -> tuple[Tensor, ...]:
    """Return the same as `linear`, its columns in equal parts, each [T, N / num_parts] in memory of its own.

    Elementwise kernels run at half of their speed on parts of wider rows.
    """
    assert x_TK.requires_grad or not torch.is_grad_enabled(), f"the input of {weight.name} requires no gradient"
    return _Linear.apply(x_TK, weight, bias, num_parts)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, weight: Weight, bias: Weight | None, num_parts: int) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x_TK)
        ctx.weight, ctx.bias, ctx.epoch = weight, bias, weight.epoch
        biases = [None] * num_parts if bias is None else bias.values.chunk(num_parts)
        weights = weight.values.chunk(num_parts)
        return tuple(F.linear(x_TK, *each) for each in zip(weights, biases, strict=True))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor, None, None, None]:
        (x_TK,) = ctx.saved_tensors
        weight: Weight = ctx.weight
        weight.check(ctx.epoch)

        def add_products(out_NK: Tensor, first: bool) -> None:
            for out, dy in zip(out_NK.chunk(len(dys)), dys, strict=True):
                add_product(out, dy, x_TK, first=first)

        def add_sums(out_N: Tensor, first: bool) -> None:
            for out, dy in zip(out_N.chunk(len(dys)), dys, strict=True):
                add_bias_gradient(out, dy, first=first)

        weight.add_gradient(add_products)
        if ctx.bias is not None:
            ctx.bias.add_gradient(add_sums)
        dx_TK: Tensor | None = None
        for dy, part in zip(dys, weight.values.chunk(len(dys)), strict=True):
            dx_TK = dy @ part if dx_TK is None else torch.addmm(dx_TK, dy, part, out=dx_TK)
        assert dx_TK is not None, "there is a part"
        return dx_TK, None, None, None


def add_bias(x_TN: Tensor, bias: Weight) -> Tensor:
    """Return x + b for a bias that is added after a sum over ranks."""
    return _AddBias.apply(x_TN, bias)


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TN: Tensor, bias: Weight) -> Tensor:
        ctx.bias = bias
        return x_TN + bias.values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor, None]:
        ctx.bias.add_gradient(lambda out, first: add_bias_gradient(out, dy_TN, first=first))
        return dy_TN, None
