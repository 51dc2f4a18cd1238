"""RMSNorm and LayerNorm over the last dim, of x or of a residual stream that x is added to.

y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias; RMSNorm has no bias and takes the means for 0.
Forward and backward are one native pass each. Arithmetic is fp64 for fp64 tensors, else fp32; a 16-bit
result is rounded once. The norm is that of the rounded sum, so a norm of a sum that was made elsewhere has its bits.
The bits of y, of the sum and of its gradient depend on the row alone; on the CPU no bit depends on the number of
threads. Saved for the backward: the sum (or x), weight, and one number a row, two for LayerNorm. Other
forms (`trainer.ops.forms`) save no number. Under torch.compile the plain form is used, which the compiler fuses with
its neighbours. Sources: Zhang and Sennrich, "Root Mean Square
Layer Normalization", 2019; Ba, Kiros and Hinton, "Layer Normalization", 2016.
"""

from typing import Any, Protocol

import torch
from torch import Tensor

from threefold.errors import UserError
from trainer.ops import forms, native
from trainer.ops.dtypes import wide_dtype
from trainer.ops.once import differentiable_once

RMS_NORM, LAYER_NORM = 0, 1  # csrc/ops/ops.h: op_norm


class Handles(Protocol):
    """A norm's weight and bias where they are not kept: the backward reads them again and hands gradients over."""

    def read(self) -> tuple[Tensor, Tensor | None]:
        """Return both, as they were in the forward."""

    def take(self, gradients: tuple[Tensor, ...]) -> None:
        """Take the gradients of weight and bias in the wide dtype."""


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """RMSNorm of x [..., D] with weight [D] of the same dtype and device; differentiable once.

    Raises UserError if weight does not fit x, or the dtype is not float64, float32, bfloat16 or float16.
    """
    return add_norm(x, None, weight, None, eps)[0]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """LayerNorm of x [..., D] with weight and bias [D] of the same dtype and device; differentiable once.

    Raises UserError as `rms_norm` does.
    """
    return add_norm(x, None, weight, bias, eps)[0]


def add_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float,
    handles: Handles | None = None, form: str = "csrc",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the norm of the sum of x and residual, and that sum, for the residual stream to go on.

    RMSNorm without a bias, LayerNorm with one; differentiable once. Without a residual the sum is x. Use the returned
    sum in place of x: then one pass of the backward adds up what comes back through both results. With `handles`
    weight and bias are not kept, and autograd has no gradients of them. Raises UserError as `rms_norm` does.
    """
    if x.dim() == 0 or weight.shape != x.shape[-1:]:
        raise UserError(f"norm: weight {list(weight.shape)} does not fit the last dim of x {list(x.shape)}")
    others = (("weight", weight, weight.shape), ("bias", bias, weight.shape), ("residual", residual, x.shape))
    for name, other, shape in others:
        if other is None:
            continue
        if other.dtype != x.dtype or other.device != x.device:
            raise UserError(
                f"norm: {name} is {other.dtype} on {other.device}, x is {x.dtype} on {x.device}; they must agree"
            )
        if other.shape != shape:
            raise UserError(f"norm: {name} {list(other.shape)} does not fit x {list(x.shape)}")
    if torch.compiler.is_compiling():
        return add_norm_reference(x, residual, weight, bias, eps)
    return _AddNorm.apply(x, residual, weight, bias, eps, handles, form)


def add_norm_reference(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the same in plain torch, in the same precision."""
    total = x if residual is None else x + residual
    wide = total.to(wide_dtype(x.dtype))
    if bias is not None:
        wide = wide - wide.mean(-1, keepdim=True)
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.to(wide.dtype)
    return (y if bias is None else y + bias.to(wide.dtype)).to(x.dtype), total


def _apex(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Return the same by the fused norms of NVIDIA Apex, which take no residual, and weights of the dtype of x."""
    norms = forms.package("apex.normalization.fused_layer_norm")
    total = x if residual is None else x + residual
    weight, shape = weight.to(x.dtype), weight.shape
    if bias is None:
        return norms.fused_rms_norm_affine(total, weight, shape, eps), total
    return norms.fused_layer_norm_affine(total, weight, bias.to(x.dtype), shape, eps), total


_FUNCTIONS: dict[str, forms.Function] = {"apex": _apex}


def _forward(
    form: str, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, the sum and, for the backward, 1 / the root of each row after, for LayerNorm, its mean.

    All inputs are contiguous.
    """
    if form != "csrc":
        y, total = forms.forward(form, _FUNCTIONS.get(form, add_norm_reference), x, residual, weight, bias, eps)
        return y, total, x.new_empty(0)
    y, total = torch.empty_like(x), x if residual is None else torch.empty_like(x)
    norm = RMS_NORM if bias is None else LAYER_NORM
    numbers = x.new_empty((*x.shape[:-1], norm + 1), dtype=wide_dtype(x.dtype))
    if x.numel() > 0:
        inputs = (x.data_ptr(), native.pointer(residual), weight.data_ptr(), native.pointer(bias))
        outputs = (total.data_ptr(), y.data_ptr(), numbers.data_ptr())
        rows, cols = x.numel() // x.shape[-1], x.shape[-1]
        native.call("add_norm_forward", x, norm, *inputs, *outputs, rows, cols, eps)
    return y, total, numbers


def _backward(
    form: str, dy: Tensor, dsum: Tensor | None, total: Tensor, weight: Tensor, bias: Tensor | None, eps: float,
    numbers: Tensor,
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """Return the gradient of the sum, in its dtype, and those of weight and bias, in the wide one.

    All inputs are contiguous.
    """
    if form != "csrc":
        wide = wide_dtype(total.dtype)
        weights = (weight.to(wide), None if bias is None else bias.to(wide))  # so that their gradients are not rounded
        gradients = (dy, torch.zeros_like(total) if dsum is None else dsum)
        wanted = (0, 2) if bias is None else (0, 2, 3)
        (dx, *dweights), _ = forms.backward(
            form, _FUNCTIONS.get(form, add_norm_reference), wanted, gradients, total, None, *weights, eps
        )
        return dx, tuple(dweights)
    dx, count, num_cols = torch.empty_like(total), numbers.shape[-1], total.shape[-1]
    if total.numel() == 0:
        return dx, tuple(numbers.new_zeros(count, num_cols))
    num_rows = total.numel() // num_cols
    # the gradients of the weights and, below them, the partial sums that they are made of
    sums = numbers.new_empty(1 + native.partials("add_norm", total, num_rows), count, num_cols)
    inputs = (dy.data_ptr(), native.pointer(dsum), total.data_ptr(), weight.data_ptr(), numbers.data_ptr())
    outputs = (dx.data_ptr(), sums.data_ptr(), sums[1].data_ptr())
    native.call("add_norm_backward", total, count - 1, *inputs, *outputs, num_rows, num_cols)
    return dx, tuple(sums[0])


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float,
        handles: Handles | None, form: str,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        x, weight = x.contiguous(), weight.contiguous()
        residual, bias = (None if each is None else each.contiguous() for each in (residual, bias))
        y, total, numbers = _forward(form, x, residual, weight, bias, eps)
        ctx.save_for_backward(total, numbers)
        ctx.set_materialize_grads(False)
        ctx.weights, ctx.handles = (weight, bias) if handles is None else None, handles
        ctx.eps, ctx.form = eps, form
        return y, total

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor | None, dsum: Tensor | None) -> tuple[Tensor | None, ...]:
        has_residual = ctx.needs_input_grad[1]
        if dy is None:  # y was not used
            return dsum, dsum if has_residual else None, *[None] * 5
        total, numbers = ctx.saved_tensors
        dsum = None if dsum is None else dsum.contiguous()
        weight, bias = ctx.weights or ctx.handles.read()
        dx, dweights = _backward(ctx.form, dy.contiguous(), dsum, total, weight, bias, ctx.eps, numbers)
        gradients: tuple[Tensor | None, ...] = (None, None)
        if ctx.handles is not None:
            ctx.handles.take(dweights)
        else:
            gradients = (*(each.to(total.dtype, copy=True) for each in dweights), None)[:2]
        return dx, dx if has_residual else None, *gradients, None, None, None
