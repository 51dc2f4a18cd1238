"""Wgrads: the gradients of weights, made at once, or put off as the W of a zero-bubble schedule."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

Product = Callable[[], object]


class Wgrads:
    """Where a rank's layers hand in gradients; owned by the training thread, which waits for autograd's.

    What is put off keeps the factors: the input of each linear and the gradient of its output. `is_last` says whether
    the pass in work is the last of its kind on its stage: what makes gradients there, makes the step's last ones.
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
