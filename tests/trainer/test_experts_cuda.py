"""Experts on a GPU: products of bf16 that wait for no count, the same training as on a CPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.trainer.support.moe import mixture
from tests.trainer.support.parity import alone, assert_parity, largest_gap, run_steps
from tests.trainer.support.ranks import run_ranks
from tests.trainer.support.weights import handle
from tests.trainer.test_host_waits import two_steps
from trainer.config import Config
from trainer.config.resolve import layout_of
from trainer.linear import grouped
from trainer.linear.grouped import GroupedGemm
from trainer.verify.threads import run_threads

NUM_GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(NUM_GPUS == 0, reason="needs an NVIDIA GPU")]
COUNTS = [[1, 7, 129, 0], [0, 0, 500, 0], [0, 0, 0, 0], [300, 1, 0, 299]]
LAYOUTS = [
    ("shared", "tp1", {}),
    ("plain", "tp2", {}),
    ("shared", "ep2-dp2", {"moe_rows": 1.0}),
    ("shared", "tp2-ep2-dp2", {"moe_overlap_parts": 2}),
    ("shared", "tp2-ep2-dp2", {"moe_dispatch": "alltoall"}),
    ("every second", "tp2-ep4-dp2-etp1", {}),
    ("every second", "pp2", {"schedule": "zb-h1"}),
    ("every second", "ep4-dp4", {"zero_stage": 3, "zero_whole_kib": 0}),
]


def on_gpu(config: Config, **train: Any) -> Config:
    return replace(config, train=replace(config.train, device="cuda", **train))


@pytest.mark.parametrize("padding", [0, 77])
@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("kernel", grouped.gradient_kernels(torch.device("cuda"), torch.bfloat16) if NUM_GPUS else [])
def test_products_of_bf16_are_those_of_each_matrix(
    kernel: str, counts: list[int], num_parts: int, padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing reads the ends of rows; rows behind them hold no number, and count nowhere; sums stay in fp32."""
    monkeypatch.setattr(grouped, "read_ends", lambda ends: pytest.fail("the host waits for the ends of rows"))
    generator = torch.Generator("cuda").manual_seed(1)
    num_rows, size, num_columns = sum(counts), 264, 136
    shapes = (num_parts * len(counts), size, num_columns), (num_rows, num_columns), (num_rows, num_parts * size)
    values, x, dy = (torch.randn(shape, generator=generator, device="cuda").bfloat16() for shape in shapes)
    weight, gradient = handle(values)
    gemm = GroupedGemm(weight, num_parts, lambda: kernel)
    ends = torch.tensor(counts, device="cuda").cumsum(0).int()
    x_padded, dy_padded = (
        torch.cat([rows, torch.full((padding, rows.shape[1]), torch.nan, device="cuda").bfloat16()]) for rows in (x, dy)
    )
    y, dx = gemm.forward(x_padded, ends)[:num_rows], gemm.dgrad(dy_padded, ends)[:num_rows]
    for _ in range(16):
        gemm.wgrad(lambda: (dy_padded, x_padded), ends)
    rows = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).cuda()
    wide = values.double().view(num_parts, len(counts), size, num_columns)
    parts = dy.double().unflatten(1, (num_parts, size))
    want_y = torch.einsum("prnk,rk->rpn", wide[:, rows], x.double()).flatten(1)
    want_dx = torch.einsum("prnk,rpn->rk", wide[:, rows], parts)
    sums = torch.zeros_like(wide)
    for number in range(len(counts)):
        of = rows == number
        sums[:, number] = torch.einsum("rpn,rk->pnk", parts[of], x[of].double())
    torch.testing.assert_close(y.double(), want_y, rtol=8e-3, atol=0.1)
    torch.testing.assert_close(dx.double(), want_dx, rtol=2e-2, atol=0.4)
    gap = (gradient.double() - 16 * sums.flatten(0, 1)).norm() / (16 * sums.norm()).clamp(min=1e-300)
    assert gap < 1e-6
    empty = [number for number in range(len(values)) if counts[number % len(counts)] == 0]
    assert not gradient[empty].any()


@pytest.mark.parametrize(("name", "layout", "parallel"), LAYOUTS)
def test_ranks_that_share_a_gpu_repeat_one_cpu(name: str, layout: str, parallel: dict[str, Any]) -> None:
    config = mixture(name, layout, **parallel)
    runs = run_threads(layout_of(config).world_size, run_steps, on_gpu(config), 2)
    assert_parity(runs, run_steps(0, alone(mixture(name)), 2))


@pytest.mark.skipif(NUM_GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("layout", ["ep2-dp2", "tp2-ep2-etp1", "tp2", "pp2"])
def test_gpus_that_exchange_repeat_one_cpu(layout: str) -> None:
    config = on_gpu(mixture("shared", layout))
    runs = run_ranks(layout_of(config).world_size, run_steps, config, 3, backend="nccl")
    assert_parity(runs, run_steps(0, alone(mixture("shared")), 3))


def of_bf16(layout: str) -> Config:
    config = on_gpu(mixture("shared", layout), precision="bf16")
    return replace(config, model=replace(config.model, expert_ffn_hidden_size=16))


def test_bf16_stays_near_fp32() -> None:
    """Products of bf16 are torch's grouped ones, those of fp32 the loop."""
    narrow = of_bf16("tp1")
    wide = replace(narrow, train=replace(narrow.train, precision="fp32"))
    runs = [run_threads(1, run_steps, config, 5)[0] for config in (narrow, wide)]
    assert largest_gap(*runs) < 3e-2


@pytest.mark.parametrize("layout", ["tp1", "tp2", "ep2-dp2", "pp2"])
def test_no_host_waits_for_its_gpu_in_a_step(layout: str) -> None:
    config = of_bf16(layout)
    run_threads(layout_of(config).world_size, two_steps, config)
