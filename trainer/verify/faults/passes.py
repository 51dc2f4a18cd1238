"""Faults of where passes end: before what was put off, after another micro-batch, for one of two users."""

from typing import Any

from ckptkit import ParallelLayout
from trainer.linear.weight import Weight, Wgrads
from trainer.pipeline import executor
from trainer.store.unit import Unit
from trainer.verify.faults.fault import DP, PP, Fault
from trainer.verify.faults.planting import Patch, wrapping


def each_pass_is_the_last(patch: Patch) -> None:
    patch.setattr(Wgrads, "is_last", property(lambda self: True, lambda self, value: None), raising=False)


def ending_in_b(real: Any, self: Weight, compute: Any, *, ends: bool = True) -> None:
    """End a pass before the gradients that were put off."""
    real(self, compute, ends=False)
    if ends and self._wgrads.is_last:
        self._num_ended += 1
        self._at_end()


def of_one_user(real: Any, self: Unit, *names: str) -> Any:
    weight = real(self, *names)
    if weight is not None:
        weight.num_users = 1
    return weight


PASS_FAULTS = (
    Fault(
        "deferred-left-out",
        "a W makes no products",
        PP,
        wrapping(executor, "make", lambda real, products: None),
        schedule="zb-h1",
        trips="has not come",
    ),
    Fault(
        "deferred-made-twice",
        "a W makes its products twice",
        PP,
        wrapping(executor, "make", lambda real, products: real([*products, *products])),
        schedule="zb-h1",
        trips="came after the last one",
    ),
    Fault(
        "one-deferred-left-out",
        "a W leaves out the product of one linear",
        PP,  # the first is the mark of a unit
        wrapping(executor, "make", lambda real, products: real([*products[:1], *products[2:]])),
        schedule="zb-h1",
        trips="has not come",
    ),
    Fault(
        "pass-ends-before-w",
        "a pass ends before its W",
        ParallelLayout(pp=2, dp=2),
        wrapping(Weight, "add_gradient", ending_in_b),
        schedule="zb-h1",
        trips="came after the last one",
    ),
    Fault(
        "sum-begins-early",
        "the sum of gradients begins after the first micro-batch",
        DP,
        each_pass_is_the_last,
        trips="came after the last one",
    ),
    Fault(
        "tied-sum-begins-early",
        "a tied matrix's sum begins when the head's pass has ended",
        DP,
        wrapping(Unit, "weight_if_any", of_one_user),
        trips="came after the last one",
    ),
)
