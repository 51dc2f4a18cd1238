"""On GPUs the same training as on a CPU: initial weights and dropout masks are the same there, through CUDA kernels."""

from dataclasses import replace

import pytest
import torch

from ckptkit.model.layout import ParallelLayout
from tests.trainer.pipeline.test_training import assert_equal_bits, with_schedule
from tests.trainer.support.parity import MODELS, config_for, largest_gap, run_steps
from tests.trainer.support.ranks import run_ranks
from tests.trainer.test_parity import BOUNDS, assert_trained
from trainer.config import Config, ParallelConfig
from trainer.config.resolve import resolve

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


@pytest.mark.skipif(NUM_GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("model", sorted(MODELS))
def test_other_schedules_train_as_1f1b_bit_for_bit(model: str) -> None:
    config = config_for(model, ParallelLayout(pp=min(NUM_GPUS, 3)), device="cuda")
    one, all_first, zero_bubble = (
        run_ranks(config.parallel.pp, run_steps, with_schedule(config, name), 5, backend="nccl")
        for name in ("1f1b", "gpipe", "zb-h1")
    )
    assert_equal_bits(one, all_first)
    assert_equal_bits(one, zero_bubble)


@pytest.mark.skipif(NUM_GPUS < 2, reason="needs two GPUs")
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
