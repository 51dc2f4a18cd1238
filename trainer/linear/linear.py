"""Linear: y = x W^T + b, whose backward hands the gradients of W and b to the weight itself.

x is saved for the backward, nothing of W is. The product for the gradient of W is accumulated in the wide dtype.

An op before a linear may be its `make_x`: then what the op reads is saved, and x is freed after the forward. The
backward first makes dx = dy W. From dx and what was saved one pass of the op writes its own gradient and x once more,
and x goes into dy^T x. So op and linear are one node of the graph: as two, the linear's backward would come first and
need a pass of its own to make x. For SwiGLU of F columns the one pass moves 6 T F numbers and two passes 8 T F; with a
kept product it would be 5 T F, for T F numbers of memory a layer. The pass writes over what it reads, so the backward
needs no memory beside dx.
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.linear.gemm import add_bias_gradient, add_product
from trainer.linear.weight import Weight
from trainer.mesh.group import Group


class MakeX(Protocol):
    """What makes a linear's x of the tensor that is saved in its place."""

    def forward(self, saved: Tensor) -> Tensor:
        """Return x."""

    def backward(self, dx: Tensor, saved: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient of what was saved, and x again; both may take the memory of the arguments."""


def linear(
    x_TK: Tensor, weight: Weight, bias: Weight | None = None, *, make_x: MakeX | None = None,
    gather: Group | None = None,
) -> Tensor:  # fmt: skip
    """Return x W^T + b, [T, N], for a weight [N, K]; with `make_x`, of make_x.forward(the first argument).

    While gradients are recorded x must require one: else the backward, and with it the gradient of W, would be lost.
    With `make_x` the backward may run once, and overwrites the first argument. With `gather` x is this rank's tokens
    out of those of the group, of which all are multiplied; its own alone are kept, and gathered again in the backward.
    """
    assert x_TK.requires_grad or not torch.is_grad_enabled(), f"the input of {weight.name} requires no gradient"
    return _Linear.apply(x_TK, weight, bias, make_x, gather)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, saved: Tensor, weight: Weight, bias: Weight | None, make_x: MakeX | None, gather: Group | None
    ) -> Tensor:
        ctx.save_for_backward(saved)
        ctx.weight, ctx.bias, ctx.make_x, ctx.gather, ctx.epoch = weight, bias, make_x, gather, weight.epoch
        x_TK = saved if make_x is None else make_x.forward(saved)
        if gather is not None:
            x_TK = gather.start_gather(x_TK).wait()
        return F.linear(x_TK, weight.values, None if bias is None else bias.values)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor, None, None, None, None]:
        (saved,) = ctx.saved_tensors
        weight, gather = ctx.weight, ctx.gather
        weight.check(ctx.epoch)
        gathering = gather.start_gather(saved) if gather is not None else None  # beside the product for dx
        dx, x_TK = dy_TN @ weight.values, saved
        if ctx.make_x is not None:
            dx, x_TK = ctx.make_x.backward(dx, saved.detach())
            torch.autograd.graph.increment_version(saved)  # so that a second backward is refused
        summing = None
        if gathering is not None:
            x_TK = gathering.wait()
            summing = gather.start("reduce_scatter", dx)  # beside the products for the gradients
        weight.add_product(lambda out, first: add_product(out, dy_TN, x_TK, first=first))
        if ctx.bias is not None:
            ctx.bias.add_gradient(lambda out, first: add_bias_gradient(out, dy_TN, first=first))
        if summing is not None:
            dx = gather.share(summing.wait())
        return dx, None, None, None, None


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
