"""SwiGLU on packed gate|up, and GELU in its tanh form: one native pass each, whose backward makes the product again.

Arithmetic is fp64 for fp64 tensors, else fp32; a result is rounded once. The bits of an element depend on
that element alone, on the CPU on no number of threads. Sources: Shazeer, "GLU Variants Improve Transformer", 2020;
Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from threefold.errors import UserError
from trainer.ops import forms, native
from trainer.ops.dtypes import wide_dtype
from trainer.ops.once import differentiable_once


@dataclass(frozen=True, slots=True)
class Activation:
    """A nonlinearity of rows of `num_parts` parts: C = num_parts * F columns in, F out. It is a `MakeX` of a linear."""

    name: str
    code: int  # op_activation of csrc/ops/ops.h
    num_parts: int
    form: str = "csrc"

    def in_form(self, form: str) -> "Activation":
        """Return the same in another form."""
        return self if form == self.form else replace(self, form=form)

    def forward(self, x_TC: Tensor) -> Tensor:
        """Return the product, [T, F]; x is contiguous."""
        if self.form != "csrc":
            return forms.forward(self.form, _reference, x_TC, self.num_parts)[0]
        y_TF = x_TC.new_empty(x_TC.shape[0], self._columns(x_TC))
        native.call("activation_forward", x_TC, self.code, x_TC.data_ptr(), y_TF.data_ptr(), *y_TF.shape)
        return y_TF

    def backward(self, dy_TF: Tensor, x_TC: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient of x and the product; as csrc in the memory of x and of dy, which are contiguous."""
        if self.form != "csrc":
            (dx_TC,), (y_TF,) = forms.backward(
                self.form, _reference, (0,), (dy_TF,), x_TC, self.num_parts, with_outputs=True
            )
            return dx_TC, y_TF
        self._backward(dy_TF, x_TC, x_TC, dy_TF)
        return x_TC, dy_TF

    def _backward(self, dy_TF: Tensor, x_TC: Tensor, dx_TC: Tensor, y_TF: Tensor | None) -> None:
        pointers = (dy_TF.data_ptr(), x_TC.data_ptr(), dx_TC.data_ptr(), None if y_TF is None else y_TF.data_ptr())
        native.call("activation_backward", x_TC, self.code, *pointers, x_TC.shape[0], self._columns(x_TC))

    def _columns(self, x_TC: Tensor) -> int:
        if x_TC.dim() != 2 or x_TC.shape[1] % self.num_parts or not x_TC.is_contiguous():
            raise UserError(
                f"{self.name}: x {list(x_TC.shape)} with strides {list(x_TC.stride())} does not hold dense rows of "
                f"{self.num_parts} equal parts"
            )
        return x_TC.shape[1] // self.num_parts


SWIGLU, GELU = Activation("swiglu", 0, 2), Activation("gelu", 1, 1)
ACTIVATIONS = {each.name: each for each in (SWIGLU, GELU)}


def activate(x_TC: Tensor, activation: Activation) -> Tensor:
    """Return silu(gate) * up of packed rows [gate | up], or gelu(x): [T, F]; differentiable once."""
    if torch.compiler.is_compiling():
        return activate_reference(x_TC, activation)
    return _Activate.apply(x_TC, activation)


def activate_reference(x_TC: Tensor, activation: Activation) -> Tensor:
    """Return the same in plain torch, in the same precision."""
    return _reference(x_TC, activation.num_parts)[0]


def _reference(x_TC: Tensor, num_parts: int) -> tuple[Tensor]:
    wide_TC = x_TC.to(wide_dtype(x_TC.dtype))
    if num_parts == SWIGLU.num_parts:
        gate_TF, up_TF = wide_TC.chunk(2, 1)
        return ((F.silu(gate_TF) * up_TF).to(x_TC.dtype),)
    return (F.gelu(wide_TC, approximate="tanh").to(x_TC.dtype),)


class _Activate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TC: Tensor, activation: Activation) -> Tensor:
        x_TC = x_TC.contiguous()
        ctx.save_for_backward(x_TC)
        ctx.activation = activation
        return activation.forward(x_TC)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy_TF: Tensor) -> tuple[Tensor, None]:
        (x_TC,) = ctx.saved_tensors
        dx_TC = torch.empty_like(x_TC)
        ctx.activation._backward(dy_TF.contiguous(), x_TC, dx_TC, None)
        return dx_TC, None
