"""ALiBi: slopes, a run beside plain torch under any layout, and rows that grow longer than those of training."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from ckptkit.model.layout import ParallelLayout
from tests.trainer.support.parity import (
    assert_parity,
    config_for,
    local_batch,
    make_engine,
    parameters_of,
    run_steps,
    small,
)
from trainer.config import Config, DataConfig
from trainer.ops.attention.slopes import alibi_slopes
from trainer.verify.plain_model import train
from trainer.verify.threads import run_threads

SLOW = [pytest.mark.slow, pytest.mark.ci]
CASES: dict[str, dict[str, Any]] = {"rows": {}, "documents": {"document_mask": True}}


def falling(model: str, layout: str = "tp1", data: str = "rows", **parallel: Any) -> Config:
    """A small run, of llama with a window in two of its layers."""
    config = small(config_for(model, ParallelLayout.parse(layout)))
    window = {"window": 5, "window_every": 3, "num_kv_heads": 4} if model == "llama" else {}
    shape = replace(config.model, position="alibi", num_positions=0, init_std=0.3, **window)
    parallel_config = replace(config.parallel, **parallel)
    return replace(config, model=shape, data=DataConfig(**CASES[data]), parallel=parallel_config)


@pytest.mark.parametrize(
    ("num_heads", "slopes"),
    [
        (1, [2**-8]),
        (4, [2**-2, 2**-4, 2**-6, 2**-8]),
        (3, [2**-4, 2**-8, 2**-2]),
        (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
    ],
)
def test_slopes_are_those_of_the_paper(num_heads: int, slopes: list[float]) -> None:
    assert alibi_slopes(num_heads, device=torch.device("cpu")).tolist() == pytest.approx(slopes, rel=1e-7)


@pytest.mark.parametrize(
    ("model", "data"), [("llama", "documents"), *(pytest.param("gpt2", data, marks=SLOW) for data in CASES)]
)
def test_it_is_the_one_of_plain_torch(model: str, data: str) -> None:
    config = falling(model, data=data)
    engine = make_engine(0, config)
    assert "pos.weight" not in engine.table
    state, batches = parameters_of(engine), [local_batch(config, step, engine.mesh) for step in range(2)]
    losses = []
    for step, wanted in enumerate(train(config, state, batches)):
        stats = engine.train_step(step, batches[step])
        assert (stats.loss, stats.grad_norm) == pytest.approx(wanted, rel=1e-10)
        losses.append(stats.loss)
    none = replace(config, model=replace(config.model, position="none"))
    assert make_engine(0, none).train_step(0, batches[0]).loss != pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize(
    ("model", "layout", "method"),
    [
        ("llama", "tp2", "auto"),
        ("gpt2", "pp2", "auto"),
        ("gpt2", "tp2-cp2", "ulysses"),
        ("gpt2", "cp4", "ulysses"),
        ("llama", "cp2-pp2", "allgather"),
    ],
)
@pytest.mark.parametrize("data", CASES)
@pytest.mark.slow
@pytest.mark.ci
def test_every_layout_repeats_one_process(model: str, layout: str, method: str, data: str) -> None:
    config = falling(model, layout, data, cp_method=method)
    reference = run_steps(0, falling(model, data=data), 2)
    assert_parity(run_threads(ParallelLayout.parse(layout).world_size, run_steps, config, 2), reference)
