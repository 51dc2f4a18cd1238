"""Runs of a model with experts: by name, on any layout, of a few tiny layers."""

from dataclasses import replace
from typing import Any

import torch

from ckptkit.model.layout import ParallelLayout
from tests.trainer.support.parity import config_for, make_engine, small
from trainer.config import Config
from trainer.config.resolve import layout_of, resolve
from trainer.engine import Engine

MIXTURES: dict[str, dict[str, Any]] = {
    # a number of experts that nothing divides; some have no token in a micro-batch
    "plain": {"num_experts": 5, "experts_per_token": 2, "expert_ffn_hidden_size": 8},
    "shared": {
        "num_experts": 16,
        "experts_per_token": 3,
        "expert_ffn_hidden_size": 4,
        "num_shared_experts": 2,
        "first_dense_layers": 1,
        "router_score": "sigmoid",
        "router_scale": 2.5,
    },
    "every second": {"num_experts": 8, "experts_per_token": 1, "moe_every": 2, "router_norm_topk": False},
}


def mixture(name: str, layout: str = "tp1", *, train: dict[str, Any] | None = None, **parallel: Any) -> Config:
    """A run of "llama" with experts in its layers, and with dropout; two rows a micro-batch."""
    config = small(config_for("llama", ParallelLayout.parse(layout)))
    model = replace(config.model, **{"num_layers": 4, "dropout": 0.1, "init_std": 0.2, **MIXTURES[name]})
    options = {"micro_batch_size": 2, "gradient_accumulation_steps": 0, **(train or {})}
    sizes = ParallelLayout.parse(layout)
    of_experts: dict[str, Any] = {"ep": sizes.ep, "etp": "1" if sizes.etp else "tp"}
    config = replace(config, model=model, parallel=replace(config.parallel, **of_experts | parallel))
    config = replace(config, train=replace(config.train, **options))
    return resolve(config, layout_of(config).world_size)


def set_routers(engine: Engine, values: float) -> None:
    """Let all weights of routers be one number, so that all experts have equal scores."""
    with torch.no_grad():
        for name, weights in engine.store.values():
            if ".router." in name:
                weights.fill_(values)


def engine_of(config: Config, router: float | None = None) -> Engine:
    """An engine of one process, whose routers may have one number for all weights."""
    engine = make_engine(0, config)
    if router is not None:
        set_routers(engine, router)
    return engine
