"""Faults of passes that are recorded: what a later step should read is that of the recorded one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from trainer.model.microbatch import Batch
from trainer.pipeline.graph import WARM_UP_STEPS, PassGraph
from trainer.verify.faults.fault import GRAPHS, TP, Fault
from trainer.verify.faults.planting import wrapping

DATA = {"mask_eod_loss": True}  # each step has another number of tokens
OPTIONS: dict[str, Any] = {"model": {"dropout": 0.0}, "train": {"cuda_graphs": True}, "data": DATA, "check": GRAPHS}


def first_of(change: Callable[[Batch, Batch], Batch]) -> Callable[..., Any]:
    """Let a graph read something of the batch that was recorded."""
    recorded = dict[int, Batch]()

    def run(real: Any, self: PassGraph, step: int, batch: Batch, scale: Any) -> Any:
        own = recorded.setdefault(id(self), batch) if self._num_runs >= WARM_UP_STEPS else batch
        return real(self, step, change(batch, own), scale)

    return run


def scale_of_first(real: Any, self: PassGraph, step: int, batch: Batch, scale: Callable[[], Tensor]) -> Any:
    """Let a graph have the factor of losses that was recorded."""
    if self._inputs:
        number = self._inputs[-1].clone()
        return real(self, step, batch, lambda: number)
    return real(self, step, batch, scale)


def masked_as(batch: Batch, recorded: Batch) -> Batch:
    return replace(batch, loss_mask=recorded.loss_mask)


GRAPH_FAULTS = (
    Fault(
        "graph-of-old-batch",
        "a graph reads the batch that was recorded",
        None,
        wrapping(PassGraph, "run", first_of(lambda batch, recorded: recorded)),
        **OPTIONS,
    ),
    Fault(
        "graph-of-old-mask",
        "a graph reads the loss mask that was recorded",
        TP,
        wrapping(PassGraph, "run", first_of(masked_as)),
        **OPTIONS,
    ),
    Fault(
        "graph-of-old-scale",
        "a graph divides by the tokens of the step that was recorded",
        TP,
        wrapping(PassGraph, "run", scale_of_first),
        **OPTIONS,
    ),
)
