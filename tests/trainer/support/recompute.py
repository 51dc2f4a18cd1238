"""Runs with dropout, and what of them is compared where the backward makes something again."""

from dataclasses import replace
from typing import Any, Literal

import torch

from ckptkit.model.layout import ParallelLayout
from tests.support.checks import require_equal
from tests.trainer.support.parity import assemble_weights, config_for, run_steps, small
from trainer.config import Config
from trainer.config.resolve import layout_of
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
