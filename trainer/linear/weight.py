"""Weight: the handle of a parameter on this rank: its values, and the place that its gradient is added to.

Weights are no autograd leaves. The Functions that use one hand its gradient over themselves, in the wide dtype, so that
it is never rounded to the compute dtype, and the first contribution of a step overwrites what a buffer held before.
"""

from collections.abc import Callable

from torch import Tensor

from trainer.linear.wgrads import Wgrads


def _nothing() -> None:
    """Do nothing."""


class Weight:
    """One parameter, or several that are one matrix for the arithmetic (q, k and v); owned by the training thread.

    `values` is a view of a bucket in the compute dtype. `contributes` is False on a rank whose gradient another rank of
    the holders contributes. `epoch` counts the updates: a backward must see the values that its forward saw. `wgrads`
    makes its products at once, or puts them off. `before_use` is called before values are read, `after_gradient` after
    each contribution. `num_users` is how many layers of this rank took the handle; each contributes once a micro-batch.
    """

    def __init__(
        self, name: str, values: Tensor, gradient: Tensor | None, *, contributes: bool, wgrads: Wgrads | None = None,
        before_use: Callable[[], object] = _nothing, after_gradient: Callable[[], object] = _nothing,
    ) -> None:  # fmt: skip
        self.name, self.epoch, self.num_users = name, 0, 0
        self._values, self._gradient, self._contributes = values, gradient, contributes
        self._wgrads, self._before_use, self._after_gradient = wgrads or Wgrads(), before_use, after_gradient
        self._is_first = True

    @property
    def values(self) -> Tensor:
        """Return the live values, once they are up to date."""
        self._before_use()
        return self._values

    def add_gradient(self, compute: Callable[[Tensor, bool], object], *, is_whole: bool = True) -> None:
        """Call `compute(out, first)`, which adds a contribution to `out`, or overwrites it if it is the first one.

        `is_whole` is False for a part of a contribution, unless it is the last part.
        """
        assert self._gradient is not None, f"{self.name} is held for inference"
        if self._contributes:
            compute(self._gradient, self._is_first)
            self._is_first = False
        if is_whole:
            self._after_gradient()

    def add_product(self, compute: Callable[[Tensor, bool], object]) -> None:
        """Do the same for a product of a backward pass, which a schedule may put off.

        Where one does, a weight's contributions all come this way, or its order of sums would differ from others'.
        """
        self._wgrads.add(lambda: self.add_gradient(compute))

    def begin_step(self) -> None:
        """Let the next contribution be the first."""
        self._is_first = True

    def finish_step(self) -> None:
        """Zero the gradient if nothing contributed to it."""
        if self._is_first and self._gradient is not None:
            self._gradient.zero_()

    def updated(self) -> None:
        """Note that the values changed."""
        self.epoch += 1

    def check(self, epoch: int) -> None:
        """Assert that the values are those of a forward at `epoch`."""
        assert self.epoch == epoch, f"{self.name} was updated between a forward and its backward"


def add_or_write(gradient: Tensor) -> Callable[[Tensor, bool], object]:
    """Return a contribution that is already computed."""
    return lambda out, first: out.copy_(gradient) if first else out.add_(gradient)
