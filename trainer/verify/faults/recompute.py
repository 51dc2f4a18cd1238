"""Faults of what the backward makes again: another mask, another stream, another result than the forward's."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from trainer.model import recompute
from trainer.model.host_inputs import HostInputs
from trainer.model.microbatch import MicroBatch
from trainer.model.norm import Norm
from trainer.parallel import context
from trainer.verify.faults.fault import SCHEDULES, Fault
from trainer.verify.faults.planting import Patch, wrapping


@contextmanager
def making(patch: Patch) -> Iterator[Callable[[], bool]]:
    """Return what says whether a region is being made again."""
    real, depth = recompute._made, [0]

    def make(node: Any) -> Any:
        depth[0] += 1
        try:
            return real(node)
        finally:
            depth[0] -= 1

    patch.setattr(recompute, "_made", make)
    yield lambda: depth[0] > 0


def other_masks(patch: Patch) -> None:
    real = MicroBatch.drop
    with making(patch) as is_again:

        def drop(self: MicroBatch, x_TD: torch.Tensor, *, layer: int, site: int) -> torch.Tensor:
            key = self.dropout
            if key is not None and is_again():
                self = replace(self, dropout=replace(key, seed=key.seed + 1))
            return real(self, x_TD, layer=layer, site=site)

        patch.setattr(MicroBatch, "drop", drop)


def stream_before_the_branch(patch: Patch) -> None:
    real, streams = Norm.__call__, dict[int, torch.Tensor]()
    with making(patch) as is_again:

        def call(self: Norm, x: torch.Tensor, branch: torch.Tensor | None = None) -> Any:
            if is_again() and branch is None and id(self) in streams:
                return real(self, x + (streams[id(self)] - x).detach())
            if branch is not None:
                streams[id(self)] = x.detach()
            return real(self, x, branch)

        patch.setattr(Norm, "__call__", call)


def results_of_the_last_call(patch: Patch) -> None:
    real, last = vars(context)["attention"], list[torch.Tensor]()

    def attend(*arguments: Any) -> torch.Tensor:
        results = arguments[5]
        if results and last:
            results[:] = last
        out = real(*arguments)
        last[:] = [each.detach() for each in results or ()]
        return out

    patch.setattr(context, "attention", attend)


def read_before_it_came(real: Any, self: HostInputs, memory: torch.Tensor, mark: Any) -> None:
    """Read the input of a layer without a wait for it."""
    real(self, memory, None)


RECOMPUTE_FAULTS = (
    Fault(
        "input-read-early",
        "a layer reads its input before that came back from the host's memory",
        None,
        wrapping(HostInputs, "arrive", read_before_it_came),
        train={"recompute": "full", "recompute_offload": True},
        check=SCHEDULES,
    ),
    Fault(
        "dropout-drawn-again",
        "dropout is drawn with another key in the second pass",
        None,
        other_masks,
        train={"recompute": "full"},
        check=SCHEDULES,
    ),
    Fault(
        "norm-of-stream-before",
        "a norm is made again of the stream before its branch",
        None,
        stream_before_the_branch,
        train={"recompute": "selective"},
        check=SCHEDULES,
    ),
    Fault(
        "gradient-of-the-stream",
        "a linear's gradient is made of the stream in place of its norm",
        None,
        wrapping(recompute, "_read", lambda real, node, number: recompute._made(node)[1][0].detach()),
        train={"recompute": "selective"},
        check=SCHEDULES,
    ),
    Fault(
        "attention-of-another-layer",
        "attention keeps the results of another layer",
        None,
        results_of_the_last_call,
        train={"recompute": "full", "recompute_keep": "attention"},
        check=SCHEDULES,
    ),
)
