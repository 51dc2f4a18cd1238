"""RMSNorm, y = x / sqrt(mean(x^2) + eps) * weight over the last dim, forward and backward in one native pass each.

Arithmetic is fp32 for bf16 and fp32 tensors, fp64 for fp64; a bf16 result is rounded once. The bits of y and of the
gradient of x depend on the row alone; on the CPU no bit depends on the number of threads. Saved for the backward: x,
weight and one number a row. Under torch.compile the plain form is used, which the compiler fuses with its neighbours.
Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
"""

from typing import Any

import torch
from torch import Tensor

from threefold.errors import UserError
from trainer.ops import native
from trainer.ops.dtypes import wide_dtype


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """RMSNorm of x [..., D] with weight [D] of the same dtype and device; differentiable once.

    Raises UserError if weight does not fit x, or the dtype is not float64, float32 or bfloat16.
    """
    if x.dim() == 0 or weight.shape != x.shape[-1:]:
        raise UserError(f"rms_norm: weight {list(weight.shape)} does not fit the last dim of x {list(x.shape)}")
    if weight.dtype != x.dtype or weight.device != x.device:
        raise UserError(
            f"rms_norm: weight is {weight.dtype} on {weight.device}, x is {x.dtype} on {x.device}; they must agree"
        )
    if torch.compiler.is_compiling():
        return rms_norm_reference(x, weight, eps)
    return _RmsNorm.apply(x, weight, eps)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Return the same in plain torch, in the same precision."""
    wide = x.to(wide_dtype(x.dtype))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.to(wide.dtype)).to(x.dtype)


def rms_norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return y and, for the backward, 1 / sqrt(mean(x^2) + eps) of each row; x is contiguous."""
    y = torch.empty_like(x)
    rstd = x.new_empty(x.shape[:-1], dtype=wide_dtype(x.dtype))
    if x.numel() > 0:
        pointers = (x.data_ptr(), weight.data_ptr(), y.data_ptr(), rstd.data_ptr())
        native.call("rmsnorm_forward", x, *pointers, rstd.numel(), x.shape[-1], eps)
    return y, rstd


def rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x, in its dtype, and of the weight, in fp32 (fp64 for fp64); dy and x are contiguous."""
    dx = torch.empty_like(x)
    if x.numel() == 0:
        return dx, torch.zeros_like(weight, dtype=wide_dtype(x.dtype))
    num_rows, num_cols = rstd.numel(), x.shape[-1]
    # the weight gradient and, below it, the partial sums that it is made of
    sums = x.new_empty((1 + native.partials("rmsnorm", x, num_rows), num_cols), dtype=wide_dtype(x.dtype))
    inputs = (dy.data_ptr(), x.data_ptr(), weight.data_ptr(), rstd.data_ptr())
    outputs = (dx.data_ptr(), sums.data_ptr(), sums[1].data_ptr())
    native.call("rmsnorm_backward", x, *inputs, *outputs, num_rows, num_cols)
    return dx, sums[0]


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        y, rstd = rms_norm_forward(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, rstd = ctx.saved_tensors
        dx, dweight = rms_norm_backward(dy.contiguous(), x, weight, rstd)
        return dx, dweight.to(weight.dtype, copy=True), None
