"""Faults of where passes end: before what was put off, after another micro-batch, for one of two users."""

from typing import Any

from ckptkit.model.layout import ParallelLayout
from tests.trainer.support.faults import DP, PP, Fault, Patch, wrapping
from trainer.linear.weight import Wgrads
from trainer.pipeline import executor
from trainer.store.bucket import Bucket
from trainer.store.unit import Unit


def each_pass_is_the_last(patch: Patch) -> None:
    patch.setattr(Wgrads, "is_last", property(lambda self: True, lambda self, value: None), raising=False)


def ending_in_b(real: Any, self: Unit) -> None:
    """The gradients that were put off come later."""
    self.end_adding()
    self.release()


PASS_FAULTS = [
    Fault("a W makes no products", PP, wrapping(executor, "make", lambda real, products: None), schedule="zb-h1",
          trips="has not ended"),
    Fault("a W makes its products twice", PP,
          wrapping(executor, "make", lambda real, products: real([*products, *products])), schedule="zb-h1",
          trips="began after its last one"),
    Fault("a W leaves out the product of one linear", PP,  # the first is the mark of a unit
          wrapping(executor, "make", lambda real, products: real([*products[:1], *products[2:]])), schedule="zb-h1"),
    Fault("a pass ends before its W", ParallelLayout(pp=2, dp=2), wrapping(Unit, "end_backward", ending_in_b),
          schedule="zb-h1", trips="began after its last one"),
    Fault("the sum of gradients begins after the first micro-batch", DP, each_pass_is_the_last,
          trips="began after its last one"),
    Fault("a tied matrix's sum begins when the head's pass has ended", DP,
          wrapping(Bucket, "end", lambda real, self, user: real(self, user) or True)),
]  # fmt: skip
