"""Products in eight bits: the same numbers under every layout, schedule and recompute."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ckptkit.model.layout import ParallelLayout
from tests.trainer.support.fp8 import RECIPES, eight_bits
from tests.trainer.support.fp8_faults import compare_copies, compare_names, compare_products, compare_spoilt
from tests.trainer.support.parity import assert_parity, local_batch, make_engine, run_steps
from tests.trainer.support.threads import run_threads
from trainer.config import Fp8Config

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
@pytest.mark.parametrize("fp8", [{"pow2_scale": False}, {"wgrad": "bf16"}], ids=["narrow", "wide"])
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


@pytest.mark.parametrize(
    "shows", [compare_products, compare_spoilt, compare_copies, compare_names], ids=lambda shows: shows.__name__
)
def test_without_a_fault_they_pass(shows: Callable[[], None]) -> None:
    shows()


def test_shares_of_values_are_counted_in_some_steps() -> None:
    config = eight_bits("tensorwise", train={"seq_length": 128, "global_batch_size": 2}, fp8={"stats_interval": 2})
    engine = make_engine(0, config)
    stats = [engine.train_step(step, local_batch(config, step, engine.mesh)) for step in range(2)]
    assert "fp8_saturated" not in stats[0].extras
    saturated, zero = (stats[1].extras[f"fp8_{name}"] for name in ("saturated", "zero"))
    assert len(saturated) == len(zero) == config.model.num_layers
    assert all(0 <= share < 1e-3 for share in saturated), "scales are powers of two: few values reach the limit"
    assert all(0 < share < 0.5 for share in zero), "gradients of masked tokens are small"
