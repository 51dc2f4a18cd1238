"""Weight: the handle of a parameter on this rank: its values, and the place that its gradient is added to.

Weights are no autograd leaves. The Functions that use one hand its gradient over themselves, in the wide dtype, so that
it is never rounded to the compute dtype, and the first contribution of a step overwrites what a buffer held before. A
Function knows its last contribution of a pass, the executor the last pass of a step: so the last of a step is known
without a count of what came before it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

Product = Callable[[], object]


# cuBLAS is slow for one product of bf16 into fp32 with more rows of output than this; measured on an H200
MAX_ROWS = 8192


class Products(Protocol):
    """The products of one weight W [N, K] for T tokens: each number format has its own.

    `Fp8Gemm` says what is between the steps: here they hand the tensors themselves on.
    """

    def take(self, x_TK: Tensor, *, keeps: bool = False) -> Any:
        """Return what `forward` reads of x, and if it `keeps` it what `keep` does."""

    def keep(self, x: Any) -> tuple[Tensor, ...]:
        """Return the tensors to keep for `wgrad`."""

    def retake(self, *tensors: Tensor) -> Any:
        """Return what `wgrad` reads, from what `keep` returned or from x itself."""

    def share(self, dy_TN: Tensor) -> Any:
        """Return what `dgrad` and `wgrad` read of dy."""

    def forward(self, x: Any, bias_N: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
        """Return x W^T + b, [T, N], in `out` if there is one."""

    def dgrad(self, dy: Any, *, out: Tensor | None = None) -> Tensor:
        """Return dy W, [T, K], in `out` if there is one."""

    def wgrad(self, dy: Any, x: Any, *, ends: bool = True) -> None:
        """Add dy^T x to the weight's gradient, now or when the schedule makes it; `ends` as for `Weight`."""


@dataclass(frozen=True, slots=True)
class Gemm:
    """The products in the dtype of the weight itself."""

    weight: "Weight"

    def take(self, x_TK: Tensor, *, keeps: bool = False) -> Tensor:
        """Return x."""
        return x_TK

    def keep(self, x_TK: Tensor) -> tuple[Tensor, ...]:
        """Return x alone."""
        return (x_TK,)

    def retake(self, *tensors: Tensor) -> Tensor:
        """Return x."""
        return tensors[0]

    def share(self, dy_TN: Tensor) -> Tensor:
        """Return dy."""
        return dy_TN

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


class Wgrads:
    """Where a rank's layers hand in gradients; owned by the training thread, which waits for autograd's.

    They are made at once, or put off as the W of a schedule, which keeps the factors: the input of each linear and the
    gradient of its output. `is_last` says whether the pass in work is the last of its kind on its stage.
    """

    def __init__(self) -> None:
        self._put_off: list[Product] | None = None
        self.is_last = False

    def add(self, product: Product) -> None:
        """Make a product, or put it off inside `putting_off`; what marks a place among products comes this way too."""
        if self._put_off is None:
            product()
        else:
            self._put_off.append(product)

    @contextmanager
    def putting_off(self) -> Iterator[list[Product]]:
        """Put the products of the enclosed backward pass off, into the list that this returns."""
        put_off: list[Product] = []
        self._put_off = put_off
        try:
            yield put_off
        finally:
            self._put_off = None


@torch.no_grad()
def make(products: list[Product]) -> None:
    """Make products in their order, letting go of each one's factors."""
    products.reverse()
    while products:
        products.pop()()


@dataclass(slots=True)
class Access:
    """What may be done with some weights now: `reads` their values, `adds` to their gradients."""

    reads: bool = True
    adds: bool = True


class Weight:
    """One parameter, or several that are one matrix for the arithmetic (q, k and v); owned by the training thread.

    `values` is a view of a bucket in the compute dtype. `contributes` is False on a rank whose gradient another rank of
    the holders contributes. `epoch` counts the updates: a backward must see the values that its forward saw. `wgrads`
    makes its gradients at once, or puts them off. `access` is that of the unit which has the weight: a pass of it.
    `gemm` makes its products, if it is a matrix. `num_users` Functions use it in a pass; `at_end` is called at the end
    of each one's last contribution of a step, or of each pass if gradients are summed at its end: `ends_each_pass`.
    """

    def __init__(
        self, name: str, values: Tensor, gradient: Tensor | None, *, contributes: bool, wgrads: Wgrads | None = None,
        access: Access | None = None, at_end: Callable[[], object] = lambda: None, ends_each_pass: bool = False,
    ) -> None:  # fmt: skip
        self.name, self.shape, self.epoch, self.num_users = name, values.shape, 0, 0
        self._values, self._gradient, self._contributes = values, gradient, contributes
        self._wgrads, self._access, self._at_end = wgrads or Wgrads(), access or Access(), at_end
        self._is_first, self._num_ended, self._ends_each_pass = True, 0, ends_each_pass
        self.gemm: Products = Gemm(self)

    def show(self, *, values: Tensor | None = None, gradient: Tensor | None = None) -> None:
        """Let the values, or the gradient, be a part of a flat buffer from now on."""
        if values is not None:
            self._values = values.view(self.shape)
        if gradient is not None:
            self._gradient = gradient.view(self.shape)

    @property
    def values(self) -> Tensor:
        """Return the live values, which are up to date within a pass of the unit."""
        assert self._access.reads, f"{self.name} was read outside of the passes of its unit"
        return self._values

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the values."""
        return self._values.dtype

    @property
    def is_late(self) -> bool:
        """Return whether a user's last contribution of the step, or of the pass, has not come."""
        return self._num_ended < self.num_users

    def add_gradient(self, compute: Callable[[Tensor, bool], object], *, ends: bool = True) -> None:
        """Call `compute(out, first)`, which adds a contribution to `out`, or overwrites it if it is the first one.

        It is its user's last one in this pass if it `ends`. A schedule may put it off. Then it does so for all
        contributions of a backward pass, in their order.
        """
        own = compute if self._contributes else None
        self._wgrads.add(lambda: self._add(own, ends=ends))

    def _add(self, compute: Callable[[Tensor, bool], object] | None, *, ends: bool) -> None:
        assert self._gradient is not None, f"{self.name} is held for inference"
        assert self._access.adds, f"a gradient of {self.name} came outside of the passes of its unit"
        assert self.is_late or not self._num_ended, (
            f"a gradient of {self.name} came after the last one of the {'pass' if self._ends_each_pass else 'step'}"
        )
        if compute is not None:
            compute(self._gradient, self._is_first)
            self._is_first = False
        if ends and (self._ends_each_pass or self._wgrads.is_last):
            self._num_ended += 1
            self._at_end()

    def begin_sum(self) -> None:
        """Let the next contribution be the first of a step, or of a pass."""
        self._is_first, self._num_ended = True, 0

    def finish_sum(self) -> None:
        """Zero the gradient if nothing contributed to it."""
        if self._is_first and self._gradient is not None:
            self._gradient.zero_()

    def check(self, epoch: int) -> None:
        """Assert that the values are those of a forward at `epoch`."""
        assert self.epoch == epoch, f"{self.name} was updated between a forward and its backward"


def add_or_write(gradient: Tensor) -> Callable[[Tensor, bool], object]:
    """Return a contribution that is already computed."""
    return lambda out, first: out.copy_(gradient) if first else out.add_(gradient)
