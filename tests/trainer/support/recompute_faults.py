"""Faults of what the backward makes again: another mask, another stream, another result than the forward's."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch

from ckptkit.model.layout import ParallelLayout
from tests.support.checks import require_equal
from tests.trainer.support.faults import Fault, Patch, wrapping
from tests.trainer.support.parity import assemble_weights, config_for, run_steps, small
from trainer.config import Config
from trainer.config.resolve import layout_of
from trainer.model import recompute
from trainer.model.microbatch import MicroBatch
from trainer.model.norm import Norm
from trainer.parallel import context
from trainer.verify.threads import run_threads

Model = Literal["llama", "gpt2"]


def dropping(model: Model, layout: str, **parallel: Any) -> Config:
    """A short run with dropout."""
    config = small(config_for(model, ParallelLayout.parse(layout)))
    shape = replace(config.model, dropout=0.1, num_layers=max(2 * config.parallel.pp, 2))
    return replace(config, model=shape, parallel=replace(config.parallel, **parallel))


def compare_again(config: Config, **again: Any) -> None:
    """A run that keeps all and one that makes something again: losses, norms, the evaluation and the weights."""
    runs, others = (
        run_threads(layout_of(each).world_size, run_steps, each, 2)
        for each in (config, replace(config, train=replace(config.train, **again)))
    )
    for run, other in zip(runs, others, strict=True):
        for key in ("losses", "norms", "evaluation"):
            require_equal(run[key] == other[key], key)
    weights = assemble_weights(others)
    for name, values in assemble_weights(runs).items():
        require_equal(torch.equal(values, weights[name]), name)


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
    real, last = context.attention, list[torch.Tensor]()

    def attend(*arguments: Any) -> torch.Tensor:
        results = arguments[5]
        if results and last:
            results[:] = last
        out = real(*arguments)
        last[:] = [each.detach() for each in results or ()]
        return out

    patch.setattr(context, "attention", attend)


def shows(**again: Any) -> Callable[[], None]:
    return partial(compare_again, dropping("llama", "tp1"), **again)


RECOMPUTE_FAULTS = [
    Fault("dropout is drawn with another key in the second pass", None, other_masks, shows=shows(recompute="full")),
    Fault("a norm is made again of the stream before its branch", None, stream_before_the_branch,
          shows=shows(recompute="selective")),
    Fault("a linear's gradient is made of the stream in place of its norm", None,
          wrapping(recompute, "_read", lambda real, node, number: recompute._made(node)[1][0].detach()),
          shows=shows(recompute="selective")),
    Fault("attention keeps the results of another layer", None, results_of_the_last_call,
          shows=shows(recompute="full", recompute_keep="attention")),
]  # fmt: skip
