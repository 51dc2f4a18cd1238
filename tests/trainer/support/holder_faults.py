"""Faults of who holds a parameter, and of who contributes to the sum over its holders."""

from collections.abc import Callable
from typing import Any

from ckptkit.model.layout import ParallelLayout
from tests.trainer.support.faults import TP, Fault, Patch, wrapping
from trainer.mesh.layout import GROUPS, OVER_DATA, Axes
from trainer.model import table
from trainer.store.parameter import Parameter

EP = ParallelLayout(tp=2, ep=2, dp=4)


def contributed_by_all_that_cut(real: Any, self: Parameter, *args: Any) -> bool:
    return bool(self.placement.cuts) or real(self, *args)


def held_apart(name: str) -> Callable[[Patch], None]:
    """Let the holders along the axes of a name be the data-parallel ranks alone."""

    def held_axes(real: Any, *args: Any, **options: Any) -> Axes:
        axes: Axes = real(*args, **options)
        return OVER_DATA if axes == GROUPS[name] else axes

    return wrapping(table, "holders", held_axes)


HOLDER_FAULTS = [
    Fault("norms are left out of their holders on other tp ranks", TP, held_apart("tp.cp.dp"), cuts_tokens=True),
    Fault("heads that two tp ranks hold are left out of their holders", ParallelLayout(tp=4), held_apart("kv.cp.dp")),
    Fault("gradients of experts are summed over dp", EP, held_apart("edp")),
    Fault("each tp rank contributes what ep alone cuts", EP,
          wrapping(Parameter, "contributes_on", contributed_by_all_that_cut)),
    Fault("experts on other tp ranks are left out of the holders", EP, held_apart("tp.edp")),
]  # fmt: skip
