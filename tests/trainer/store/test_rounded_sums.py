"""Gradients that travel in int8: rounded at random by place, with a scale for each 128, and added in the wide dtype."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.trainer.run.test_temporaries import Peak
from tests.trainer.store.test_narrow_sums import config as config_of
from tests.trainer.store.test_narrow_sums import gradients, summed, traffic
from tests.trainer.support.parity import largest_gap, local_batch, make_engine, run_steps
from tests.trainer.support.ranks import run_ranks
from tests.trainer.test_equalities import assert_equal
from threefold.errors import UserError
from trainer.config import Config
from trainer.config.resolve import layout_of
from trainer.mesh.group import Network
from trainer.ops import rounding
from trainer.run.memory import rank_memory
from trainer.verify.threads import run_threads

KEY, WORDS = (5, 7), (0, 0, 0)
LATER = [pytest.mark.slow, pytest.mark.ci]
SHARDED: dict[str, Any] = {"zero_stage": 3, "dp_shard": 2, "zero_whole_kib": 0}


def config(layout: str, **parallel: Any) -> Config:
    return config_of("llama", layout, **{"grad_reduce": "int8"} | parallel)


def packed(values: torch.Tensor, num_parts: int, *, first: int = 0, words: tuple[int, ...] = WORDS) -> torch.Tensor:
    return rounding.packed(values, num_parts, first=first, key=KEY, words=words)


def arrived(values: torch.Tensor, num_parts: int = 1, **place: Any) -> torch.Tensor:
    out = torch.empty(len(values) // num_parts, dtype=values.dtype)
    rounding.sum_packed(packed(values, num_parts, **place), num_parts, out)
    return out


@pytest.mark.parametrize(("size", "dtype"), [(8, torch.float32), (1040, torch.float32), (1040, torch.float64)])
def test_the_mean_of_many_roundings_is_the_value(size: int, dtype: torch.dtype) -> None:
    number, values = 1000, gradients(3, size).to(dtype)
    found = torch.stack([arrived(values, words=(step, 0, 0)) for step in range(number)]).double()
    steps = torch.cat([part.abs().max().expand(len(part)) for part in values.double().split(128)]) / 127
    assert ((found - values).abs() <= steps * (1 + 1e-4)).all()
    assert ((found.mean(0) - values).abs() <= 5 * steps / 2 / number**0.5).all()  # the deviation is half a step at most
    assert found.std(0).max() > steps.min() / 3


def test_a_sum_is_that_of_its_parts() -> None:
    values = gradients(1, 3 * 200)
    exact = values.view(3, 200).sum(0)
    assert (arrived(values, 3) - exact).abs().max() <= 3 * values.abs().max() / 127 * (1 + 1e-4)


def test_what_is_drawn_depends_on_the_place_alone() -> None:
    values = gradients(0, 2048)
    whole = packed(values, 1)
    assert torch.equal(packed(values, 4), whole)
    assert torch.equal(packed(values[1024:], 2, first=1024), whole[8:])
    in_pieces = rounding.packed(values, 4, first=0, key=KEY, words=WORDS, at_once=384)
    assert torch.equal(in_pieces, whole)
    for words in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        assert not torch.equal(packed(values, 1, words=words), whole)


@pytest.mark.parametrize("spoilt", [float("nan"), float("inf"), -float("inf")])
def test_a_block_with_a_number_that_is_not_finite_has_none_that_is(spoilt: float) -> None:
    values = gradients(0, 384)
    values[130] = spoilt
    finite = arrived(values).isfinite().view(3, 128)
    assert (finite.all(1).tolist(), finite.any(1).tolist()) == ([True, False, True], [True, False, True])


@pytest.mark.parametrize("values", [torch.zeros(256), torch.full((256,), 3e38), torch.full((256,), 1e-44)])
def test_numbers_at_the_ends_of_the_range_stay_near(values: torch.Tensor) -> None:
    torch.testing.assert_close(arrived(values), values, rtol=0.01, atol=1.2e-38)


@pytest.mark.parametrize(("size", "num_parts"), [(1 << 19, 2), (1 << 20, 8), ((1 << 18) + 16, 2)])
def test_what_packing_takes_is_counted(size: int, num_parts: int) -> None:
    counted, values = rounding.rounding_bytes(size, num_parts, 4), gradients(0, size)
    with Peak() as peak:
        rows = packed(values, num_parts)
    assert rows.numel() == rounding.packed_bytes(size, num_parts, 4)
    assert 0.7 < (peak.peak - rows.numel()) / counted <= 1
    out = torch.empty(size // num_parts)
    with Peak() as peak:
        rounding.sum_packed(rows, num_parts, out)
    assert peak.peak <= counted


@pytest.mark.parametrize("layout", ["dp3", "tp2-dp2"])
def test_owners_add_what_each_rank_has(layout: str) -> None:
    made = config(layout)
    assert_near(run_threads(layout_of(made).world_size, summed, made))


@pytest.mark.slow
@pytest.mark.ci
def test_processes_exchange_the_same_parts() -> None:
    assert_near(run_ranks(3, summed, config("dp3")))


def assert_near(runs: list[list[tuple[int, Any, Any]]]) -> None:
    largest = 0.0
    for run in runs:
        for size, own, expected in run:
            gaps = abs(own - expected)[own != 0]  # what no parameter has is zero
            assert (gaps < (size * 5 / 100 if size > 1 else 1e-6)).all()
            largest = max([largest, *gaps])
    assert largest > 0.01


@pytest.mark.parametrize(
    ("layout", "parallel", "changed"),
    [
        ("dp2", {}, {"overlap_grad_reduce": False, "overlap_param_gather": False}),
        pytest.param("dp2-pp2", {}, {"schedule": "gpipe"}, marks=LATER),
        pytest.param("dp2-pp2", {}, {"schedule": "zb-h1"}, marks=LATER),
        pytest.param("dp4", SHARDED, {"overlap_grad_reduce": False}, marks=LATER),
        pytest.param("dp4", SHARDED, {"zero_stage": 2}, marks=LATER),
        pytest.param("dp2-pp2", SHARDED | {"dp_shard": 0}, {"schedule": "gpipe"}, marks=LATER),
        pytest.param("dp2-pp2", SHARDED | {"dp_shard": 0}, {"schedule": "zb-h1"}, marks=LATER),
    ],
)
def test_orders_of_passes_change_no_bit(layout: str, parallel: dict[str, Any], changed: dict[str, Any]) -> None:
    one = config(layout, **parallel)
    assert_equal(one, replace(one, parallel=replace(one.parallel, **changed)))


@pytest.mark.parametrize("parallel", [pytest.param({}, marks=LATER), SHARDED], ids=["stage 1", "shard groups"])
def test_training_is_near(parallel: dict[str, Any]) -> None:
    narrow = config("dp4", **parallel)
    wide = replace(narrow, parallel=replace(narrow.parallel, grad_reduce="wide"))
    one, other = (run_threads(4, run_steps, each, 3)[0] for each in (narrow, wide))
    assert largest_gap(one, other) > 0
    assert one["losses"] == pytest.approx(other["losses"], rel=2e-3)


def with_spoilt_gradient(rank: int, config: Config, *, network: Network | None = None) -> None:
    """A step in which one gradient of the last rank is not finite."""
    engine = make_engine(rank, config, network=network)
    bucket = engine.store.buckets[0]
    start = bucket.start_reduce

    def start_reduce(**options: bool) -> None:
        bucket._whole_gradients[5] = float("inf")
        start(**options)

    if rank == 1:
        bucket.start_reduce = start_reduce  # type: ignore[method-assign]
    engine.train_step(0, local_batch(config, 0, engine.mesh))


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_a_gradient_that_is_not_finite_is_in_the_norm(zero_stage: int) -> None:
    with pytest.raises(UserError, match=r"the loss is 4[.\d]+, the gradient norm nan"):
        run_threads(2, with_spoilt_gradient, config("dp2", zero_stage=zero_stage, zero_whole_kib=0))


def test_a_quarter_as_much_travels() -> None:
    narrow, wide = (run_threads(2, traffic, config("dp2", grad_reduce=name))[0] for name in ("int8", "wide"))
    assert 3 < wide["reduce_scatter"] / narrow["all_to_all"] <= 4 / (1 + 4 / 128)
    assert narrow["all_gather"] == wide["all_gather"]


def test_a_dry_run_counts_what_travels() -> None:
    narrow, wide = (rank_memory(config("dp2", grad_reduce=name), 0) for name in ("int8", "wide"))
    assert narrow.gradients == pytest.approx(wide.gradients * (1 + 2 * (1 + 4 / 128) / 4), rel=1e-6)
    assert narrow.temporaries > wide.temporaries
