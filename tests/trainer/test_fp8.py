"""Products in eight bits: the same numbers under every layout, schedule and recompute."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit.model.layout import ParallelLayout
from tests.trainer.support.fp8 import RECIPES, eight_bits
from tests.trainer.support.fp8_faults import (
    compare_copies,
    compare_names,
    compare_products,
    compare_spoilt,
    factors,
    gemm_of,
)
from tests.trainer.support.parity import assert_parity, local_batch, make_engine, run_steps
from tests.trainer.support.training import Job, curve, hash_of, write_config, write_stores
from trainer.config import Fp8Config
from trainer.linear import fp8
from trainer.linear.fp8 import product
from trainer.ops.fp8 import quantise
from trainer.verify.threads import run_threads

ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
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


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize(
    ("num_kv_heads", "parallel", "fp8"), [(1, {}, {}), (2, {"sequence_parallel": "off"}, {"wgrad": "bf16"})]
)
def test_ranks_with_the_same_keys_round_the_sum_of_their_gradients(
    num_kv_heads: int, parallel: dict[str, Any], fp8: dict[str, Any]
) -> None:
    model = {"hidden_size": 512, "head_size": 128, "num_kv_heads": num_kv_heads, "ffn_hidden_size": 512}
    reference = run_steps(0, eight_bits("blockwise", model=model, fp8=fp8), 2)
    cut = eight_bits("blockwise", ParallelLayout(tp=4), model=model, fp8=fp8, **parallel)
    assert_parity(run_threads(4, run_steps, cut, 2), reference)


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


@ON_GPU
@pytest.mark.cuda
@pytest.mark.parametrize("recipe", RECIPES)
def test_products_on_a_gpu_are_those_of_the_values(recipe: str) -> None:
    x_TK, values_NK, dy_TN = (factor.cuda().bfloat16() for factor in factors())
    gradient = torch.zeros(values_NK.shape, device="cuda")
    gemm = gemm_of(recipe, values_NK, gradient)
    for num_rows in (256, 136, 1):  # the others are those of evaluations
        x = gemm.take(x_TK[:num_rows], keeps=num_rows == 256)
        y_TN = gemm.forward(x)
        assert x.rows is not None
        of_x, weight = x.rows.wide(torch.float64), gemm.copy_of_weight(columns=False)
        assert weight is not None
        expected = of_x @ weight.wide(torch.float64).t()
        assert (y_TN.double() - expected).norm() <= 4e-3 * expected.norm()
    x, dy = gemm.take(x_TK, keeps=True), gemm.share(dy_TN)
    assert dy.rows is not None
    transposed = gemm.copy_of_weight(columns=True)
    assert transposed is not None
    dx_TK, expected = gemm.dgrad(dy), dy.rows.wide(torch.float64) @ transposed.wide(torch.float64).t()
    assert (dx_TK.double() - expected).norm() <= 4e-3 * expected.norm()
    kept = gemm.retake(*gemm.keep(x))
    assert dy.columns is not None
    assert kept.columns is not None
    expected = dy.columns.wide(torch.float64) @ kept.columns.wide(torch.float64).t()
    for times in (1, 2):
        gemm.wgrad(dy, kept, ends=False)
        assert (gradient.double() - times * expected).norm() <= 1e-3 * times * expected.norm(), "written, then added"


@pytest.mark.parametrize("is_fast", [False, True])
def test_forward_products_alone_are_fast_if_a_run_says_so(is_fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def noting(*factors: Any, is_fast: bool = False, **kwargs: Any) -> torch.Tensor:
        asked.append(is_fast)
        return product(*factors, is_fast=is_fast, **kwargs)

    monkeypatch.setattr(fp8, "product", noting)
    run_steps(0, eight_bits("rowwise", fp8={"fast_accum": is_fast}), 1)
    assert set(asked) == {False, is_fast}, "products of backward passes never are"


@ON_GPU
@pytest.mark.cuda
def test_fast_sums_are_less_exact() -> None:
    rows, columns = (torch.randn(256, 16384, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    a, b = (
        quantise(factor, "row", torch.float8_e4m3fn, pow2=True, rows=True, columns=False)[0]
        for factor in (rows, columns)
    )
    assert a is not None
    assert b is not None
    expected = a.wide(torch.float64) @ b.wide(torch.float64).t()
    exact, fast = (
        (product(a, b, torch.float32, is_fast=is_fast).double() - expected).norm() for is_fast in (False, True)
    )
    assert exact < fast / 4


@ON_GPU
@pytest.mark.cuda
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("wgrad", ["bf16", "fp8"])
def test_a_gpu_trains_as_a_cpu(recipe: str, wgrad: str) -> None:
    on_cpu = run_steps(0, eight_bits(recipe, fp8={"wgrad": wgrad}, precision="bf16"), 4)
    config = eight_bits(recipe, fp8={"wgrad": wgrad}, precision="bf16", train={"device": "cuda"})
    on_gpu = run_steps(0, config, 4)
    assert on_gpu["losses"] == pytest.approx(on_cpu["losses"], abs=0.03)
    assert on_gpu["losses"][-1] < on_gpu["losses"][0]


@pytest.mark.slow
@pytest.mark.ci
def test_a_run_that_is_killed_goes_on_bit_for_bit(tmp_path: Path) -> None:
    write_stores(tmp_path)
    flags = "--bf16", "--fp8", "rowwise", "--fp8.wgrad", "fp8", "--pp", 2, "--checkpoint.save-interval", 3

    def job(name: str) -> Job:
        arguments = write_config(tmp_path), *flags, "--save", tmp_path / name, "--train-steps", 10
        return Job(2, *arguments, metrics=tmp_path / f"{name}.jsonl")

    job("whole").run()
    job("killed").run_until_step(5)
    job("killed").run()
    assert curve(tmp_path / "killed.jsonl") == curve(tmp_path / "whole.jsonl")
    assert hash_of(tmp_path / "killed", 10).all == hash_of(tmp_path / "whole", 10).all
