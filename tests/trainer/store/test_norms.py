"""Norms of layers are the same under any layout, add up to the gradient's, and are those of the weights themselves."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from ckptkit.model.layout import ParallelLayout
from tests.trainer.support.parity import make_engine
from tests.trainer.test_engine import LAYOUTS_OF_FOUR, batches, small_config
from trainer.mesh.group import Network
from trainer.store.norms import layer_of
from trainer.verify.threads import run_threads

STEPS = 2


def norms_of(rank: int, *cases: tuple[Any, ...], network: Network | None = None) -> list[list[dict[str, Any]]]:
    """The norms of steps under layouts in turn."""
    runs = []
    for model, layout, zero_stage, dp_shard in cases:
        config = small_config(model, layout, zero_stage=zero_stage, dp_shard=dp_shard)
        config = replace(config, log=replace(config.log, norms_interval=2))
        engine = make_engine(rank, config, network=network)
        engine.initialise()
        runs.append([])
        for step, batch in zip(range(STEPS), batches(engine.mesh.coords.dp, layout.dp)):
            stats = engine.train_step(step, batch)
            runs[-1].append({**engine.norms.by_layer(stats.squares), "grad_norm": stats.grad_norm})
    return runs


@pytest.mark.parametrize("model", ["llama", pytest.param("gpt2", marks=[pytest.mark.slow, pytest.mark.ci])])
def test_norms_do_not_depend_on_the_layout(model: str) -> None:
    [alone] = norms_of(0, (model, ParallelLayout(), 1, 0))
    assert [step.keys() >= {"grad_norms"} for step in alone] == [False, True]
    by_rank = run_threads(4, norms_of, *((model, *case) for case in LAYOUTS_OF_FOUR))
    for rank in by_rank:
        for case, steps in zip(LAYOUTS_OF_FOUR, rank, strict=True):
            for step, expected in zip(steps, alone, strict=True):
                assert step.keys() == expected.keys()
                for name in step.keys() - {"grad_norm"}:
                    assert step[name] == pytest.approx(expected[name], rel=1e-10), (case, name)


def test_they_are_those_of_the_tensors() -> None:
    config = small_config("gpt2", ParallelLayout())
    engine = make_engine(0, replace(config, log=replace(config.log, norms_interval=1)))
    engine.initialise()
    before = {name: values.clone() for name, values in engine.store.values()}
    stats = engine.train_step(0, next(batches()))
    norms = engine.norms.by_layer(stats.squares)
    for layer, norm in norms["weight_norms"].items():
        parts = [values.flatten() for name, values in before.items() if layer_of(name) == layer]
        assert norm == pytest.approx(torch.cat(parts).norm().item(), rel=1e-12)
    total = sum(norm**2 for norm in norms["grad_norms"].values()) ** 0.5
    assert total == pytest.approx(stats.grad_norm, rel=1e-12)
    assert "layers.1" in norms["grad_norms"]
