"""Weight: the handle of a parameter on this rank: its values, and the place that its gradient is added to.

Weights are no autograd leaves. The Functions that use one hand its gradient over themselves, in the wide dtype, so that
it is never rounded to the compute dtype, and the first contribution of a step overwrites what a buffer held before. A
Function knows its last contribution of a pass, the executor the last pass of a step: so the last of a step is known
without a count of what came before it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.linear.gemm import Gemm

Product = Callable[[], object]


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
    of each one's last contribution of a step.
    """

    def __init__(
        self, name: str, values: Tensor, gradient: Tensor | None, *, contributes: bool, wgrads: Wgrads | None = None,
        access: Access | None = None, at_end: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        self.name, self.shape, self.epoch, self.num_users = name, values.shape, 0, 0
        self._values, self._gradient, self._contributes = values, gradient, contributes
        self._wgrads, self._access, self._at_end = wgrads or Wgrads(), access or Access(), at_end
        self._is_first, self._num_ended = True, 0
        self.gemm = Gemm(self)

    @property
    def values(self) -> Tensor:
        """Return the live values, which are up to date within a pass of the unit."""
        assert self._access.reads, f"{self.name} was read outside of the passes of its unit"
        return self._values

    @property
    def is_late(self) -> bool:
        """Return whether a user's last contribution of the step has not come."""
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
        assert self.is_late or not self._num_ended, f"a gradient of {self.name} came after the last one of the step"
        if compute is not None:
            compute(self._gradient, self._is_first)
            self._is_first = False
        if ends and self._wgrads.is_last:
            self._num_ended += 1
            self._at_end()

    def begin_step(self) -> None:
        """Let the next contribution be the first."""
        self._is_first, self._num_ended = True, 0

    def finish_step(self) -> None:
        """Zero the gradient if nothing contributed to it."""
        if self._is_first and self._gradient is not None:
            self._gradient.zero_()

    def check(self, epoch: int) -> None:
        """Assert that the values are those of a forward at `epoch`."""
        assert self.epoch == epoch, f"{self.name} was updated between a forward and its backward"


def add_or_write(gradient: Tensor) -> Callable[[Tensor, bool], object]:
    """Return a contribution that is already computed."""
    return lambda out, first: out.copy_(gradient) if first else out.add_(gradient)
