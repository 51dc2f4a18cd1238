"""A run that drops weights of attention: that of plain torch, whatever cuts heads and tokens and orders the passes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

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
from tests.trainer.support.training import Job, hash_of
from tests.trainer.test_equalities import assert_equal
from trainer.config import Config, DataConfig
from trainer.run.activations import CHOICES
from trainer.verify.plain_model import Spread, evaluation, train
from trainer.verify.threads import run_threads

SLOW = [pytest.mark.slow, pytest.mark.ci]
CASES: dict[str, dict[str, Any]] = {"rows": {}, "documents": {"document_mask": True}}


def dropping(model: str, layout: str = "tp1", data: str = "rows", **parallel: Any) -> Config:
    """A small run, of llama with a window in two of its layers."""
    config = small(config_for(model, ParallelLayout.parse(layout)))
    window = {"window": 5, "window_every": 3, "num_kv_heads": 4} if model == "llama" else {}
    shape = replace(config.model, attention_dropout=0.3, init_std=0.3, **window)
    parallel_config = replace(config.parallel, **parallel)
    return replace(config, model=shape, data=DataConfig(**CASES[data]), parallel=parallel_config)


@pytest.mark.parametrize(
    ("model", "data"), [("llama", "documents"), *(pytest.param("gpt2", data, marks=SLOW) for data in CASES)]
)
def test_it_is_the_one_of_plain_torch_and_off_in_an_evaluation(model: str, data: str) -> None:
    config = dropping(model, data=data)
    engine = make_engine(0, config)
    state, batches = parameters_of(engine), [local_batch(config, step, engine.mesh) for step in range(2)]
    still = replace(config, model=replace(config.model, attention_dropout=0.0))
    evaluated = evaluation(still, state, batches[1], Spread(config.model))
    assert engine.eval_batch(batches[1]) == pytest.approx(evaluated, rel=1e-10)
    losses = []
    for step, wanted in enumerate(train(config, state, batches)):
        stats = engine.train_step(step, batches[step])
        assert (stats.loss, stats.grad_norm) == pytest.approx(wanted, rel=1e-10)
        losses.append(stats.loss)
    assert make_engine(0, still).train_step(0, batches[0]).loss != pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize(
    ("model", "layout", "method"),
    [
        ("llama", "tp2", "auto"),
        ("gpt2", "pp2", "auto"),
        ("gpt2", "dp2", "auto"),
        ("gpt2", "tp2-cp2", "ulysses"),
        ("gpt2", "cp4", "ulysses"),
        ("llama", "cp2-pp2", "allgather"),
    ],
)
@pytest.mark.parametrize("data", CASES)
@pytest.mark.slow
@pytest.mark.ci
def test_every_layout_repeats_one_process(model: str, layout: str, method: str, data: str) -> None:
    config = dropping(model, layout, data, cp_method=method)
    reference = run_steps(0, dropping(model, data=data), 2)
    assert_parity(run_threads(ParallelLayout.parse(layout).world_size, run_steps, config, 2), reference)


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
@pytest.mark.slow
@pytest.mark.ci
def test_the_order_of_passes_changes_no_bit(schedule: str) -> None:
    assert_equal(dropping("gpt2", "pp2", schedule="1f1b"), dropping("gpt2", "pp2", schedule=schedule))


@pytest.mark.parametrize("choice", ["selective of attention", "full that keeps attention", "full"])
@pytest.mark.parametrize(("model", "layout", "method"), [("gpt2", "tp1", "auto"), ("llama", "cp2", "ulysses")])
@pytest.mark.slow
@pytest.mark.ci
def test_what_is_made_again_changes_no_bit(model: str, layout: str, method: str, choice: str) -> None:
    config = dropping(model, layout, cp_method=method)
    assert_equal(config, replace(config, train=replace(config.train, **CHOICES[choice])))


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_run_has_the_bits_of_one_that_was_not(job_config: Path, tmp_path: Path) -> None:
    flags = [job_config, "--tp", 2, "--train-steps", 12, "--save-interval", 2, "--model.attention-dropout", 0.2]
    jobs = {}
    for run in ("whole", "killed"):
        jobs[run] = Job(2, *flags, "--save", tmp_path / run, metrics=tmp_path / f"{run}.jsonl")
    jobs["whole"].run()
    jobs["killed"].run_until_step(5)
    jobs["killed"].run()
    assert hash_of(tmp_path / "killed", 12) == hash_of(tmp_path / "whole", 12)
