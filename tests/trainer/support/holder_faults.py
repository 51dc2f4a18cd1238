"""Faults of who holds and contributes what ep alone cuts, which no model has: sums of a store show them."""

from functools import partial
from typing import Any

from ckptkit.model.layout import ParallelLayout
from tests.trainer.support.experts import compare_experts
from tests.trainer.support.faults import ShownFault
from trainer.store.parameter import Parameter
from trainer.verify.faults.holders import held_apart
from trainer.verify.faults.planting import wrapping

SHOWS = partial(compare_experts, ParallelLayout(tp=2, ep=2, dp=4))


def contributed_by_all_that_cut(real: Any, self: Parameter, *args: Any) -> bool:
    return bool(self.placement.cuts) or real(self, *args)


HOLDER_FAULTS = [
    ShownFault(
        "each tp rank contributes what ep alone cuts",
        wrapping(Parameter, "contributes_on", contributed_by_all_that_cut),
        SHOWS,
    ),
    ShownFault("experts on other tp ranks are left out of the holders", held_apart("tp.edp"), SHOWS),
]
