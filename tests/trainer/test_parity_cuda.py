"""On GPUs the same training as on a CPU: initial weights and dropout masks are the same there, through CUDA kernels."""

import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch

from ckptkit.model.layout import ParallelLayout
from tests.trainer.pipeline.test_training import assert_equal_bits, with_schedule
from tests.trainer.support.parity import MODELS, alone, assert_parity, config_for, largest_gap, run_steps
from tests.trainer.support.ranks import run_ranks
from tests.trainer.test_host_waits import CASES as HOST_CASES
from tests.trainer.test_host_waits import two_steps
from tests.trainer.test_matrix import CASES, ROWS, deep, reference
from tests.trainer.test_parity import BOUNDS, assert_trained
from trainer.config import Config, ParallelConfig
from trainer.config.resolve import layout_of, resolve
from trainer.verify.threads import run_threads

NUM_GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(NUM_GPUS == 0, reason="needs an NVIDIA GPU")]
LAYOUTS = [
    ParallelLayout(),
    ParallelLayout(tp=2),
    ParallelLayout(pp=2),
    ParallelLayout(tp=2, pp=2),
    ParallelLayout(tp=2, dp=2),
    ParallelLayout(dp=4),
]
LOSS_LAYOUTS = ("dp2", "tp2", "pp2", "pp2-virtual2", "dp4", "tp2-dp2", "dp2-pp2", "tp2-pp2")
needs_two = pytest.mark.skipif(NUM_GPUS < 2, reason="needs two GPUs")


def fits(layout: str) -> bool:
    return 1 < ParallelLayout.parse(layout).world_size <= NUM_GPUS


@pytest.mark.parametrize("model", sorted(MODELS))
def test_gpus_repeat_one_cpu(model: str) -> None:
    reference = run_ranks(1, run_steps, config_for(model, ParallelLayout()), 20)[0]
    for layout in LAYOUTS:
        if layout.world_size <= NUM_GPUS:
            config = config_for(model, layout, device="cuda")
            for run in run_ranks(layout.world_size, run_steps, config, 20, backend="nccl"):
                assert_trained(run, config, fall=0.1)
                assert largest_gap(run, reference) <= BOUNDS["fp64"], str(layout)


@pytest.mark.parametrize("model", sorted(MODELS))
def test_bf16_on_a_gpu_stays_near_fp32(model: str) -> None:
    wide = run_ranks(1, run_steps, config_for(model, ParallelLayout(), precision="fp32"), 5)[0]
    config = config_for(model, ParallelLayout(), precision="bf16", device="cuda")
    narrow = run_ranks(1, run_steps, config, 5, backend="nccl")[0]
    assert largest_gap(narrow, wide) < 2e-2


@needs_two
@pytest.mark.parametrize("model", sorted(MODELS))
def test_other_schedules_train_as_1f1b_bit_for_bit(model: str) -> None:
    config = config_for(model, ParallelLayout(pp=min(NUM_GPUS, 3)), device="cuda")
    one, all_first, zero_bubble = (
        run_ranks(config.parallel.pp, run_steps, with_schedule(config, name), 5, backend="nccl")
        for name in ("1f1b", "gpipe", "zb-h1")
    )
    assert_equal_bits(one, all_first)
    assert_equal_bits(one, zero_bubble)


@needs_two
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("model", sorted(MODELS))
def test_several_stages_a_gpu_repeat_one_cpu(model: str, schedule: str) -> None:
    config = config_for(model, ParallelLayout(pp=2, virtual=2), device="cuda")
    config = with_schedule(replace(config, model=replace(config.model, num_layers=5)), schedule)
    reference = run_ranks(1, run_steps, on_one_cpu(config), 5)[0]
    for run in run_ranks(2, run_steps, config, 5, backend="nccl"):
        assert largest_gap(run, reference) <= BOUNDS["fp64"]


def on_one_cpu(config: Config) -> Config:
    train = replace(config.train, device="cpu")
    return resolve(replace(config, parallel=ParallelConfig(), train=train), 1)


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
@pytest.mark.parametrize("model", sorted(MODELS))
def test_activations_made_again_change_no_bit(model: str, precision: str) -> None:
    config = config_for(model, ParallelLayout(), precision=precision, device="cuda")
    config = replace(config, train=replace(config.train, deterministic=True))
    kept, made_again = (
        run_ranks(1, run_steps, replace(config, train=replace(config.train, recompute=recompute)), 5, backend="nccl")
        for recompute in ("none", "full")
    )
    assert_equal_bits(kept, made_again)


@pytest.mark.parametrize(("model", "layout", "parallel"), CASES)
def test_ranks_that_share_a_gpu_repeat_one_cpu(model: str, layout: str, parallel: dict[str, Any]) -> None:
    """Threads, whose transfers are copies: one GPU is enough for the arithmetic of any layout."""
    config = deep(model, layout, **parallel)
    config = replace(config, train=replace(config.train, device="cuda"))
    assert_parity(run_threads(layout_of(config).world_size, run_steps, config, 2), reference(model))


@needs_two
@pytest.mark.parametrize("model", sorted(MODELS))
@pytest.mark.parametrize(("layout", "parallel"), [row for row in ROWS if fits(row[0])])
def test_gpus_that_exchange_repeat_one_cpu(model: str, layout: str, parallel: dict[str, Any]) -> None:
    config = deep(model, layout, **parallel)
    config = replace(config, train=replace(config.train, device="cuda"))
    runs = run_ranks(layout_of(config).world_size, run_steps, config, 3, backend="nccl")
    assert_parity(runs, run_steps(0, alone(deep(model, "tp1")), 3))


@needs_two
@pytest.mark.parametrize("layout", [name for name in ("tp2", "dp2", "pp2", "tp2-dp2", "dp2-pp2") if fits(name)])
def test_what_runs_beside_changes_no_bit(layout: str) -> None:
    config = deep("llama", layout)
    config = replace(config, train=replace(config.train, device="cuda", deterministic=True))
    off = replace(config.parallel, overlap_grad_reduce=False, overlap_param_gather=False)
    one, other = (
        run_ranks(layout_of(each).world_size, run_steps, each, 5, backend="nccl")
        for each in (config, replace(config, parallel=off))
    )
    assert_equal_bits(one, other)


@needs_two
@pytest.mark.parametrize("layout", [name for name in LOSS_LAYOUTS if fits(name)])
@pytest.mark.parametrize("model", sorted(MODELS))
def test_losses_of_bf16_are_those_of_one_gpu(model: str, layout: str) -> None:
    config = deep(model, layout, tp_overlap_parts=2 if "tp" in layout else 1)
    train = replace(config.train, device="cuda", precision="bf16", train_steps=50)
    config = replace(
        config, train=train, model=replace(config.model, dropout=0.0), optim=replace(config.optim, lr=2e-4)
    )
    single = resolve(replace(config, parallel=ParallelConfig(), train=replace(train, gradient_accumulation_steps=0)), 1)
    one = run_ranks(1, run_steps, single, 50, backend="nccl")[0]
    for run in run_ranks(layout_of(config).world_size, run_steps, config, 50, backend="nccl"):
        assert run["losses"] == pytest.approx(one["losses"], abs=5e-3)
        gaps = [abs(norm / other - 1) for norm, other in zip(run["norms"], one["norms"], strict=True)]
        assert statistics.median(gaps) < 1e-2


@needs_two
@pytest.mark.parametrize(("layout", "schedule", "num_parts"), [case for case in HOST_CASES if fits(case[0])], ids=str)
def test_no_host_waits_for_its_gpu_in_a_step(layout: str, schedule: Any, num_parts: int) -> None:
    config = deep("llama", layout, schedule=schedule, tp_overlap_parts=num_parts)
    config = replace(config, train=replace(config.train, device="cuda"))
    run_ranks(layout_of(config).world_size, two_steps, config, backend="nccl")


@needs_two
def test_gradients_that_travel_as_bf16_train_near_one_gpu() -> None:
    config = deep("llama", "dp2", grad_reduce="bf16")
    config = replace(config, train=replace(config.train, device="cuda", precision="fp32"))
    wide = replace(config, parallel=replace(config.parallel, grad_reduce="wide"))
    one, other = (run_ranks(2, run_steps, each, 3, backend="nccl")[0] for each in (config, wide))
    assert 0 < largest_gap(one, other) < 1e-3
