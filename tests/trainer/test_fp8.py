"""Products in eight bits: the same numbers under every layout, schedule and recompute."""

from dataclasses import replace
from typing import Any

import pytest

from ckptkit.model.layout import ParallelLayout
from tests.trainer.support.parity import assert_parity, config_for, local_batch, make_engine, run_steps
from tests.trainer.support.threads import run_threads
from trainer.config import Config, Fp8Config, ModelConfig
from trainer.config.check import cross_faults
from trainer.config.resolve import resolve

MODEL = ModelConfig(
    num_layers=2,
    hidden_size=256,
    num_heads=4,
    num_kv_heads=4,
    head_size=64,
    ffn_hidden_size=256,
    vocab_size=61,
    round_vocab_to=1,
    qk_norm=True,
)
BATCH = {"seq_length": 256, "global_batch_size": 4}
RECIPES = ("tensorwise", "rowwise", "blockwise")


def eight_bits(
    recipe: str,
    layout: ParallelLayout | None = None,
    *,
    fp8: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    precision: str = "fp64",
    **parallel: Any,
) -> Config:
    """A run whose parts of weights, and tokens of a rank, are multiples of 128."""
    layout = layout or ParallelLayout()
    config = config_for("llama", layout, precision=precision)
    config = replace(
        config,
        model=MODEL,
        parallel=replace(config.parallel, **parallel),
        train=replace(config.train, gradient_accumulation_steps=0, **{**BATCH, **(train or {})}),
        fp8=Fp8Config(recipe=recipe, **{"wgrad": "fp8", **(fp8 or {})}),
    )
    assert cross_faults(config, layout.world_size) == []
    return resolve(config, layout.world_size)


LAYOUTS = {
    "tp2": (ParallelLayout(tp=2), {}),
    "tp2, whole tokens": (ParallelLayout(tp=2), {"sequence_parallel": "off"}),
    "pp2": (ParallelLayout(pp=2), {"schedule": "zb-h1"}),
    "dp2, zero 3": (ParallelLayout(dp=2), {"zero_stage": 3}),
    "cp2": (ParallelLayout(cp=2), {}),
    "tp2-dp2, zero 2": (ParallelLayout(tp=2, dp=2), {"zero_stage": 2}),
}


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("fp8", [{}, {"wgrad": "bf16"}], ids=["narrow", "wide"])
def test_layouts_have_the_numbers_of_one_process(recipe: str, fp8: dict[str, Any]) -> None:
    reference = run_steps(0, eight_bits(recipe, fp8=fp8), 2)
    for layout, parallel in LAYOUTS.values():
        runs = run_threads(layout.world_size, run_steps, eight_bits(recipe, layout, fp8=fp8, **parallel), 2)
        assert_parity(runs, reference)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_cut_of_both_sides_has_them_too(recipe: str) -> None:
    short = {"seq_length": 128, "global_batch_size": 2}
    reference = run_steps(0, eight_bits(recipe, train=short), 1)
    layout = ParallelLayout(tp=2, dp=2)
    assert_parity(run_threads(4, run_steps, eight_bits(recipe, layout, train=short), 1), reference)
    plain = run_steps(0, replace(eight_bits(recipe, train=short), fp8=Fp8Config()), 1)
    assert abs(plain["losses"][0] - reference["losses"][0]) > 1e-5, "eight bits are coarser"
    assert reference["losses"][0] == pytest.approx(plain["losses"][0], abs=0.02)


SAME = {
    "gpipe": ({"schedule": "gpipe"}, {}),
    "zb-h1": ({"schedule": "zb-h1"}, {}),
    "recompute full": ({}, {"recompute": "full"}),
    "recompute of MLPs": ({}, {"recompute": "selective", "recompute_modules": ("mlp",)}),
    "recompute of norms": ({}, {"recompute": "selective"}),
    "nothing beside": ({"overlap_grad_reduce": False, "overlap_param_gather": False}, {}),
    "zero 3": ({"zero_stage": 3}, {}),
}


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("recipe", RECIPES)
def test_schedules_and_recompute_change_no_bit(recipe: str) -> None:
    def run(parallel: dict[str, Any], train: dict[str, Any]) -> dict[str, Any]:
        layout = ParallelLayout(pp=2, dp=2)
        train = {"seq_length": 128, "global_batch_size": 8, **train}
        runs = run_threads(4, run_steps, eight_bits(recipe, layout, train=train, precision="bf16", **parallel), 2)
        return {"losses": runs[0]["losses"], "norms": runs[0]["norms"]}

    reference = run({}, {})
    for name, (parallel, train) in SAME.items():
        assert run(parallel, train) == reference, name


def test_shares_of_values_are_counted_in_some_steps() -> None:
    config = eight_bits("tensorwise", train={"seq_length": 128, "global_batch_size": 2}, fp8={"stats_interval": 2})
    engine = make_engine(0, config)
    stats = [engine.train_step(step, local_batch(config, step, engine.mesh)) for step in range(2)]
    assert "fp8_saturated" not in stats[0].extras
    saturated, zero = (stats[1].extras[f"fp8_{name}"] for name in ("saturated", "zero"))
    assert len(saturated) == len(zero) == config.model.num_layers
    assert all(0 <= share < 1e-3 for share in saturated), "scales are powers of two: few values reach the limit"
    assert all(0 < share < 0.5 for share in zero), "gradients of masked tokens are small"
