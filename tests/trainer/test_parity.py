"""Every layout trains alike: losses, gradient norms and weights of one process, through the native kernels.

Unequal loss masks in every micro-batch, clipping active, a vocabulary that tp does not divide, nor pp the layers.
"""

from typing import Any

import pytest

from ckptkit.model.layout import ParallelLayout, stage_layers
from tests.trainer.support.parity import (
    GLOBAL_BATCH,
    LOSSES_WITHIN,
    MICRO_BATCH,
    MODELS,
    assert_parity,
    config_for,
    largest_gap,
    run_steps,
    small,
)
from tests.trainer.support.ranks import run_ranks
from trainer.config import Config
from trainer.verify.threads import run_threads

LAYOUTS = [
    (ParallelLayout(tp=2), 1),
    (ParallelLayout(pp=2), 1),
    (ParallelLayout(dp=2), 0),
    (ParallelLayout(dp=4), 1),
    (ParallelLayout(tp=2, pp=2), 1),
    (ParallelLayout(tp=2, dp=2), 1),
]
BOUNDS = {"fp64": LOSSES_WITHIN, "fp32": 1e-5}


def assert_trained(run: dict[str, Any], config: Config, *, fall: float) -> None:
    assert run["losses"][-1] <= (1 - fall) * run["losses"][0]
    assert all(norm > config.optim.clip for norm in run["norms"]), "clipping must be active"
    op = "dropout" if config.model.dropout else "add_norm_forward"
    assert run["calls"].get(op, 0) > 0, "the native kernel was not called"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("model", "precision"),
    [("gpt2", "fp64"), pytest.param("llama", "fp64", marks=pytest.mark.ci), ("gpt2", "fp32"), ("llama", "fp32")],
)
def test_every_layout_repeats_one_process(model: str, precision: str) -> None:
    config = config_for(model, ParallelLayout(), precision=precision)
    reference = run_ranks(1, run_steps, config, 20, timeout_s=300)[0]
    assert_trained(reference, config, fall=0.1)
    for layout, zero_stage in LAYOUTS:
        config = config_for(model, layout, precision=precision, zero_stage=zero_stage)
        runs = run_ranks(layout.world_size, run_steps, config, 20, timeout_s=300)
        for run in runs:
            assert largest_gap(run, reference) <= BOUNDS[precision], f"{layout} zero_stage {zero_stage}"
        if precision == "fp64":
            assert_parity(runs, reference)


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_tp2_pp2_repeats_one_process_for_a_few_steps(model: str) -> None:
    reference = run_steps(0, config_for(model, ParallelLayout()), 2)
    layout = ParallelLayout(tp=2, pp=2)
    runs = run_threads(4, run_steps, config_for(model, layout), 2)
    assert_parity(runs, reference)
    for rank, run in enumerate(runs):
        stage = layout.coords(rank).pp
        assert run["peak_live"] == min(layout.pp - stage, GLOBAL_BATCH // MICRO_BATCH), "1F1B's bound"
        assert 0 < run["peak_sends"] <= 2, "what is kept for sending is bounded too"
        numbers = {int(name.split(".")[1]) for name in run["names"] if name.startswith("layers.")}
        assert numbers == set(stage_layers(MODELS[model].num_layers, layout.pp, stage))
        assert ("embed.weight" in run["names"]) == (stage == 0 or MODELS[model].tie_embeddings)
        assert ("norm.weight" in run["names"]) == (stage == layout.pp - 1)


@pytest.mark.ci
@pytest.mark.slow
def test_dp2_zero1_repeats_one_process_and_halves_the_optimizer() -> None:
    reference = run_steps(0, small(config_for("llama", ParallelLayout())), 2)
    runs = run_ranks(2, run_steps, small(config_for("llama", ParallelLayout(dp=2))), 2)
    assert_parity(runs, reference)
    padding = 4 * 64 * 100  # at most 64 bytes a tensor and interval
    for run in runs:
        assert abs(run["optimizer_bytes"] - reference["optimizer_bytes"] / 2) <= padding


@pytest.mark.ci
@pytest.mark.slow
def test_bf16_trains_near_fp32() -> None:
    wide = run_ranks(1, run_steps, config_for("llama", ParallelLayout(), precision="fp32"), 5)[0]
    narrow = run_ranks(2, run_steps, config_for("llama", ParallelLayout(tp=2), precision="bf16"), 5)
    assert narrow[0]["losses"] == narrow[1]["losses"]
    assert largest_gap(narrow[0], wide) < 2e-2
