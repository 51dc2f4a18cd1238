"""RMSNorm, y = x / sqrt(mean(x^2) + eps) * weight over the last dim, of x or of a residual stream that x is added to.

Forward and backward are one native pass each. Arithmetic is fp32 for bf16 and fp32 tensors, fp64 for fp64; a bf16
result is rounded once. The norm is that of the rounded sum, so a norm of a sum that was made elsewhere has its bits.
The bits of y, of the sum and of its gradient depend on the row alone; on the CPU no bit depends on the number of
threads. Saved for the backward: the sum (or x), weight and one number a row. Under torch.compile the plain form is
used, which the compiler fuses with its neighbours. Source: Zhang and Sennrich, "Root Mean Square Layer Normalization",
2019.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from threefold.errors import UserError
from trainer.ops import native
from trainer.ops.dtypes import wide_dtype

TakeGradient = Callable[[Tensor], object]


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """RMSNorm of x [..., D] with weight [D] of the same dtype and device; differentiable once.

    Raises UserError if weight does not fit x, or the dtype is not float64, float32 or bfloat16.
    """
    return add_rms_norm(x, None, weight, eps)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float = 1e-6, take_gradient: TakeGradient | None = None
) -> tuple[Tensor, Tensor]:
    """Return RMSNorm of the sum of x and residual, and that sum, for the residual stream to go on; differentiable once.

    Without a residual the sum is x. Use the returned sum in place of x: then one pass of the backward adds up what
    comes back through both results. `take_gradient`, if there is one, is called with the gradient of weight in the wide
    dtype, and autograd gets none. Raises UserError as `rms_norm` does.
    """
    if x.dim() == 0 or weight.shape != x.shape[-1:]:
        raise UserError(f"rms_norm: weight {list(weight.shape)} does not fit the last dim of x {list(x.shape)}")
    for name, other, shape in (("weight", weight, weight.shape), ("residual", residual, x.shape)):
        if other is None:
            continue
        if other.dtype != x.dtype or other.device != x.device:
            raise UserError(
                f"rms_norm: {name} is {other.dtype} on {other.device}, x is {x.dtype} on {x.device}; they must agree"
            )
        if other.shape != shape:
            raise UserError(f"rms_norm: {name} {list(other.shape)} does not fit x {list(x.shape)}")
    if torch.compiler.is_compiling():
        return add_rms_norm_reference(x, residual, weight, eps)
    return _AddRmsNorm.apply(x, residual, weight, eps, take_gradient)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Return the same in plain torch, in the same precision."""
    wide = x.to(wide_dtype(x.dtype))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.to(wide.dtype)).to(x.dtype)


def add_rms_norm_reference(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Return the same in plain torch, in the same precision."""
    total = x if residual is None else x + residual
    return rms_norm_reference(total, weight, eps), total


def _forward(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, the sum and, for the backward, 1 / sqrt(mean(sum^2) + eps) of each row; all inputs are contiguous."""
    y, total = torch.empty_like(x), x if residual is None else torch.empty_like(x)
    rstd = x.new_empty(x.shape[:-1], dtype=wide_dtype(x.dtype))
    if x.numel() > 0:
        inputs = (x.data_ptr(), native.pointer(residual), weight.data_ptr())
        outputs = (total.data_ptr(), y.data_ptr(), rstd.data_ptr())
        native.call("add_rmsnorm_forward", x, *inputs, *outputs, rstd.numel(), x.shape[-1], eps)
    return y, total, rstd


def _backward(dy: Tensor, dsum: Tensor | None, total: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the sum, in its dtype, and of the weight, in the wide one; all inputs are contiguous."""
    dx = torch.empty_like(total)
    if total.numel() == 0:
        return dx, torch.zeros_like(weight, dtype=rstd.dtype)
    num_rows, num_cols = rstd.numel(), total.shape[-1]
    # the weight gradient and, below it, the partial sums that it is made of
    sums = rstd.new_empty(1 + native.partials("add_rmsnorm", total, num_rows), num_cols)
    inputs = (dy.data_ptr(), native.pointer(dsum), total.data_ptr(), weight.data_ptr(), rstd.data_ptr())
    outputs = (dx.data_ptr(), sums.data_ptr(), sums[1].data_ptr())
    native.call("add_rmsnorm_backward", total, *inputs, *outputs, num_rows, num_cols)
    return dx, sums[0]


class _AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, take_gradient: TakeGradient | None
    ) -> tuple[Tensor, Tensor]:
        x, weight = x.contiguous(), weight.contiguous()
        y, total, rstd = _forward(x, None if residual is None else residual.contiguous(), weight, eps)
        ctx.save_for_backward(total, rstd)
        ctx.set_materialize_grads(False)
        ctx.weight, ctx.take_gradient = weight, take_gradient
        return y, total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dsum: Tensor | None) -> tuple[Tensor | None, ...]:
        has_residual = ctx.needs_input_grad[1]
        if dy is None:  # y was not used
            return dsum, dsum if has_residual else None, None, None, None
        total, rstd = ctx.saved_tensors
        dx, dweight = _backward(dy.contiguous(), None if dsum is None else dsum.contiguous(), total, ctx.weight, rstd)
        if ctx.take_gradient is None:
            return dx, dx if has_residual else None, dweight.to(ctx.weight.dtype, copy=True), None, None
        ctx.take_gradient(dweight)
        return dx, dx if has_residual else None, None, None, None
