"""A run with capped logits: that of plain torch, under any layout, whole or made for some tokens at a time."""

from dataclasses import replace

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
from trainer.config import Config
from trainer.verify.plain_model import Spread, evaluation, train
from trainer.verify.threads import run_threads


def capped(model: str, layout: str = "tp1", *, max_logits_gib: float = 1.0) -> Config:
    """A small run whose logits are near their cap."""
    config = small(config_for(model, ParallelLayout.parse(layout)))
    shape = replace(config.model, logit_softcap=0.4, init_std=0.3)
    return replace(config, model=shape, train=replace(config.train, z_loss=0.1, max_logits_gib=max_logits_gib))


@pytest.mark.parametrize(("model", "max_logits_gib"), [("llama", 1.0), ("gpt2", 1e-6)])
def test_it_is_the_one_of_plain_torch(model: str, max_logits_gib: float) -> None:
    config = capped(model, max_logits_gib=max_logits_gib)
    engine = make_engine(0, config)
    state, batches = parameters_of(engine), [local_batch(config, step, engine.mesh) for step in range(2)]
    spread = Spread(config.model)
    assert engine.eval_batch(batches[1]) == pytest.approx(evaluation(config, state, batches[1], spread), rel=1e-10)
    for step, wanted in enumerate(train(config, state, batches)):
        stats = engine.train_step(step, batches[step])
        assert (stats.loss, stats.grad_norm) == pytest.approx(wanted, rel=1e-10)
    uncapped = make_engine(0, replace(config, model=replace(config.model, logit_softcap=0.0)))
    assert abs(uncapped.train_step(0, batches[0]).loss - stats.loss) > 0.1, "the cap cuts something"


@pytest.mark.parametrize(
    ("model", "layout"), [("gpt2", "tp2-pp2"), ("llama", "tp2"), ("llama", "dp2"), ("gpt2", "pp2")]
)
@pytest.mark.parametrize("max_logits_gib", [1.0, 1e-6])
@pytest.mark.slow
@pytest.mark.ci
def test_every_layout_repeats_one_process(model: str, layout: str, max_logits_gib: float) -> None:
    config = capped(model, layout, max_logits_gib=max_logits_gib)
    reference = run_steps(0, capped(model), 2)
    assert_parity(run_threads(ParallelLayout.parse(layout).world_size, run_steps, config, 2), reference)
