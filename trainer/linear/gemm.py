"""The three products of a weight; what is added up is in the wide dtype, whatever the dtype of the factors."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

# cuBLAS is slow for one product of bf16 into fp32 with more rows of output than this; measured on an H200
MAX_ROWS = 8192


class Matrix(Protocol):
    """A weight [N, K]: its live values, and where its gradient is added to."""

    @property
    def values(self) -> Tensor: ...
    def add_gradient(self, compute: Callable[[Tensor, bool], object], *, ends: bool = True) -> None: ...


@dataclass(frozen=True, slots=True)
class Gemm:
    """The products of one weight W [N, K] for T tokens: another number format is another object of this form."""

    weight: Matrix

    def forward(self, x_TK: Tensor, bias_N: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
        """Return x W^T + b, [T, N], in `out` if there is one."""
        values = self.weight.values
        if out is None:
            return F.linear(x_TK, values, bias_N)
        if bias_N is None:
            return torch.mm(x_TK, values.t(), out=out)
        return torch.addmm(bias_N, x_TK, values.t(), out=out)

    def dgrad(self, dy_TN: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return dy W, [T, K], in `out` if there is one."""
        return torch.mm(dy_TN, self.weight.values, out=out)

    def wgrad(self, dy_TN: Tensor, x_TK: Tensor, *, ends: bool = True) -> None:
        """Add dy^T x to the weight's gradient, now or when the schedule makes it; `ends` as for `Weight`."""
        self.weight.add_gradient(lambda out, first: add_product(out, dy_TN, x_TK, first=first), ends=ends)


def add_product(out_NK: Tensor, dy_TN: Tensor, x_TK: Tensor, *, first: bool) -> None:
    """Add dy^T x to `out`, or write it there if it is the first contribution; nothing is rounded to the factors' dtype.

    For example dy [8, 3] and x [8, 5] of bf16 give 3 x 5 sums of 8 products in fp32.
    """
    if dy_TN.dtype == out_NK.dtype:
        torch.addmm(out_NK, dy_TN.t(), x_TK, beta=0.0 if first else 1.0, out=out_NK)
    elif out_NK.is_cuda:
        for start in range(0, out_NK.shape[0], MAX_ROWS):
            rows, dy_NT = out_NK[start : start + MAX_ROWS], dy_TN[:, start : start + MAX_ROWS].t()
            if first:
                torch.mm(dy_NT, x_TK, out_dtype=out_NK.dtype, out=rows)
            else:
                torch.addmm(rows, dy_NT, x_TK, out_dtype=out_NK.dtype, out=rows)
    else:  # torch has no product of bf16 into fp32 on CPUs
        wide = out_NK.dtype
        torch.addmm(out_NK, dy_TN.t().to(wide), x_TK.to(wide), beta=0.0 if first else 1.0, out=out_NK)


def add_bias_gradient(out_N: Tensor, dy_TN: Tensor, *, first: bool) -> None:
    """Add the sum of dy over its rows to `out`, or write it there."""
    if out_N.is_cuda:  # as a product with ones it takes little more than one read of dy; torch's sum half as long again
        add_product(out_N.unsqueeze(0), dy_TN.new_ones(len(dy_TN), 1), dy_TN, first=first)
    elif first:
        torch.sum(dy_TN, 0, dtype=out_N.dtype, out=out_N)
    else:
        out_N.add_(dy_TN.sum(0, dtype=out_N.dtype))
