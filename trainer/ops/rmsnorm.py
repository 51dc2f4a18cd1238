"""RMSNorm, y = x / sqrt(mean(x^2) + eps) * weight over the last dim, forward and backward in one native pass each.

Arithmetic is fp32 for bf16 and fp32 tensors, fp64 for fp64; a bf16 result is rounded once. The bits of y and of the
gradient of x depend on the row alone; on the CPU the weight gradient does not depend on the number of threads either.
Saved for the backward: x, weight and one number a row. (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.)
"""

from typing import Any

import torch
from torch import Tensor

from threefold.errors import UserError
from trainer.ops import native


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """RMSNorm of x [..., D] with weight [D] of the same dtype and device; differentiable once."""
    if x.dim() == 0 or weight.shape != x.shape[-1:]:
        raise UserError(f"rms_norm: weight {list(weight.shape)} does not fit the last dim of x {list(x.shape)}")
    if weight.dtype != x.dtype or weight.device != x.device:
        raise UserError(
            f"rms_norm: weight is {weight.dtype} on {weight.device}, x is {x.dtype} on {x.device}; they must agree"
        )
    y, _ = torch.ops.threefold.rmsnorm_forward(x, weight, eps)
    return y


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """The same in plain torch: for comparison, and for torch.compile to fuse with its neighbours."""
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.to(wide.dtype)).to(x.dtype)


def _forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x, weight = x.contiguous(), weight.contiguous()
    y = torch.empty_like(x)
    rstd = x.new_empty(x.shape[:-1], dtype=_number(x))
    if x.numel() > 0:
        rows, cols = rstd.numel(), x.shape[-1]
        pointers = (x.data_ptr(), weight.data_ptr(), y.data_ptr(), rstd.data_ptr())
        native.call("rmsnorm_forward", x, *pointers, rows, cols, eps)
    return y, rstd


def _backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    dy, x, weight = dy.contiguous(), x.contiguous(), weight.contiguous()
    dx = torch.empty_like(x)
    if x.numel() == 0:
        return dx, torch.zeros_like(weight)
    rows, cols = rstd.numel(), x.shape[-1]
    library = native.library()
    num_partials = library.op_rmsnorm_partials_cuda(rows) if x.is_cuda else library.op_rmsnorm_partials(rows)
    sums = x.new_empty((num_partials + 1, cols), dtype=_number(x))  # the weight gradient, then its partial sums
    inputs = (dy.data_ptr(), x.data_ptr(), weight.data_ptr(), rstd.data_ptr())
    outputs = (dx.data_ptr(), sums.data_ptr(), sums[1].data_ptr())
    native.call("rmsnorm_backward", x, *inputs, *outputs, rows, cols)
    return dx, sums[0].to(weight.dtype, copy=True)


def _number(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _fake_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, x.new_empty(x.shape[:-1], dtype=_number(x))


def _fake_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    contiguous = torch.contiguous_format
    return torch.empty_like(x, memory_format=contiguous), torch.empty_like(weight, memory_format=contiguous)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output[1])
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None]:
    dx, dweight = torch.ops.threefold.rmsnorm_backward(dy, *ctx.saved_tensors)
    return dx, dweight, None


_OPS = torch.library.Library("threefold", "FRAGMENT")
_OPS.define("rmsnorm_forward(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)")
_OPS.define("rmsnorm_backward(Tensor dy, Tensor x, Tensor weight, Tensor rstd) -> (Tensor, Tensor)")
for _device in ("CPU", "CUDA"):
    _OPS.impl("rmsnorm_forward", _forward, _device)
    _OPS.impl("rmsnorm_backward", _backward, _device)
torch.library.register_fake("threefold::rmsnorm_forward", _fake_forward, lib=_OPS)
torch.library.register_fake("threefold::rmsnorm_backward", _fake_backward, lib=_OPS)
torch.library.register_autograd("threefold::rmsnorm_forward", _differentiate, setup_context=_save, lib=_OPS)
