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
from torch import Tensor

from trainer.linear.overlapped import TokenCut
from trainer.linear.weight import Weight, add_bias_gradient
from trainer.ops.once import differentiable_once


class MakeX(Protocol):
    """What makes a linear's x of the tensor that is saved in its place."""

    def forward(self, saved: Tensor) -> Tensor:
        """Return x."""

    def backward(self, dx: Tensor, saved: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient of what was saved, and x again; both may take the memory of the arguments."""


def linear(
    x_TK: Tensor, weight: Weight, bias: Weight | None = None, *, make_x: MakeX | None = None,
    gather: TokenCut | None = None, scatter: TokenCut | None = None,
) -> Tensor:  # fmt: skip
    """Return x W^T + b, [T, N], for a weight [N, K]; with `make_x`, of make_x.forward(the first argument).

    While gradients are recorded x must require one: else the backward, and with it the gradient of W, would be lost.
    With `make_x` the backward may run once, and overwrites the first argument. With `gather` x is this rank's tokens
    out of those of the group, of which all are multiplied; its own alone are kept, and gathered again in the backward.
    With `scatter` x has all tokens, the products of the group are summed, and each rank returns its own tokens.
    """
    assert x_TK.requires_grad or not torch.is_grad_enabled(), f"the input of {weight.name} requires no gradient"
    assert gather is None or make_x is None, "what is gathered is x itself"
    assert scatter is None or (gather is None and bias is None), "a bias is added after the sum"
    return _Linear.apply(x_TK, weight, bias, make_x, gather, scatter)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, saved: Tensor, weight: Weight, bias: Weight | None, make_x: MakeX | None, gather: TokenCut | None,
        scatter: TokenCut | None,
    ) -> Tensor:  # fmt: skip
        ctx.weight, ctx.bias, ctx.make_x, ctx.epoch = weight, bias, make_x, weight.epoch
        ctx.gather, ctx.scatter = gather, scatter
        x_TK = saved if make_x is None else make_x.forward(saved)
        gemm, num_rows, offsets = weight.gemm, weight.shape[0], None if bias is None else bias.values
        if gather is None and scatter is None:
            x = gemm.take(x_TK, keeps=make_x is None)
            ctx.save_for_backward(*(gemm.keep(x) if make_x is None else (saved,)))
            return gemm.forward(x, offsets)
        ctx.save_for_backward(saved)

        def multiply(x_TK: Tensor, out_TN: Tensor) -> None:
            gemm.forward(gemm.take(x_TK), offsets, out=out_TN)

        if scatter is not None:
            return scatter.start_sum(x_TK, num_rows, multiply).wait()
        assert gather is not None, "one of the two"
        out_SN = x_TK.new_empty(gather.group.size * x_TK.shape[0], num_rows)
        gather.multiply_gathered(x_TK, out_SN, multiply)
        return out_SN

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        weight, gather, scatter = ctx.weight, ctx.gather, ctx.scatter
        weight.check(ctx.epoch)
        gemm, num_columns = weight.gemm, weight.shape[1]
        shared: list[Any] = []  # of dy, or of its parts
        if gather is not None or scatter is not None:
            dy_TN = dy_TN.contiguous()

        def multiply(dy_TN: Tensor, out_TK: Tensor) -> None:
            shared.append(gemm.share(dy_TN))
            gemm.dgrad(shared[-1], out=out_TK)

        if gather is not None:
            gathering = gather.group.start_gather(tensors[0])  # beside the product for dx
            sums = gather.start_sum(dy_TN, num_columns, multiply)  # and the last sum beside those for the gradients
            tensors = (gathering.wait(),)
        elif scatter is not None:
            dx = dy_TN.new_empty(scatter.group.size * dy_TN.shape[0], num_columns)
            dy_TN = scatter.multiply_and_gather(dy_TN, dx, multiply)
        else:
            shared.append(gemm.share(dy_TN))
            dx = gemm.dgrad(shared[0])
        if ctx.make_x is not None:
            (saved,) = ctx.saved_tensors
            dx, x_TK = ctx.make_x.backward(dx, saved.detach())
            torch.autograd.graph.increment_version(saved)  # so that a second backward is refused
            tensors = (x_TK,)
        gemm.wgrad(shared[0] if len(shared) == 1 else gemm.share(dy_TN), gemm.retake(*tensors))
        if ctx.bias is not None:
            ctx.bias.add_gradient(lambda out, first: add_bias_gradient(out, dy_TN, first=first))
        if gather is not None:
            dx = sums.wait()
        return dx, None, None, None, None, None


def add_bias(x_TN: Tensor, bias: Weight) -> Tensor:
    """Return x + b for a bias that is added after a sum over ranks."""
    return _AddBias.apply(x_TN, bias)


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TN: Tensor, bias: Weight) -> Tensor:
        ctx.bias = bias
        return x_TN + bias.values

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor, None]:
        ctx.bias.add_gradient(lambda out, first: add_bias_gradient(out, dy_TN, first=first))
        return dy_TN, None
