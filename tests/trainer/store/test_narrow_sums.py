"""Gradients that travel as bf16: each rank's part is rounded once, and the parts are added in the wide dtype."""

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch

from ckptkit.model.layout import ParallelLayout
from tests.trainer.support.parity import config_for, largest_gap, local_batch, make_engine, run_steps, small
from tests.trainer.support.ranks import run_ranks
from tests.trainer.test_equalities import assert_equal
from trainer.config import Config
from trainer.config.resolve import layout_of
from trainer.mesh.group import Network
from trainer.run.memory import rank_memory
from trainer.store.bucket import Bucket
from trainer.verify.recording import recording_of
from trainer.verify.threads import run_threads


def config(model: str, layout: str, **parallel: Any) -> Config:
    made = small(config_for(model, ParallelLayout.parse(layout), precision="fp32"))
    return replace(made, parallel=replace(made.parallel, **{"grad_reduce": "bf16"} | parallel))


def gradients(rank: int, size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank))


def summed(rank: int, config: Config, *, network: Network | None = None) -> list[tuple[int, Any, Any]]:
    """Of each bucket its number of holders, what this rank owns of a sum, and what it should be."""
    engine, results = make_engine(rank, config, network=network), []
    for bucket in engine.store.buckets:
        group = bucket.group
        for weight in bucket.weights:
            weight._is_first = False  # what was added is in the buffer
        bucket.gradients.copy_(gradients(rank, len(bucket.gradients)))
        bucket.start_reduce()
        bucket.finish_reduce()
        parts = [gradients(other, len(bucket.gradients))[slice(*bucket.owned)] for other in group.ranks]
        rounded = [part.bfloat16().float() if group.size > 1 else part for part in parts]
        own = bucket.gradients[slice(*bucket.owned)]
        results.append((group.size, own.numpy().copy(), torch.stack(rounded).sum(0).numpy()))
    return results


def assert_sums(runs: list[list[tuple[int, Any, Any]]], sizes: set[int]) -> None:
    assert {size for run in runs for size, _, _ in run} == sizes
    for run in runs:
        for _, own, expected in run:
            torch.testing.assert_close(torch.from_numpy(own), torch.from_numpy(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("layout", "sizes"), [("dp3", {3}), ("tp2-dp2", {2, 4}), ("tp2", {1, 2})])
def test_parts_are_rounded_once_and_added_wide(layout: str, sizes: set[int]) -> None:
    made = config("llama", layout)
    assert_sums(run_threads(layout_of(made).world_size, summed, made), sizes)


@pytest.mark.slow
def test_processes_exchange_the_same_parts() -> None:
    assert_sums(run_ranks(3, summed, config("llama", "dp3")), {3})


def test_training_is_near_and_the_overlap_changes_no_bit() -> None:
    narrow = config("gpt2", "dp2")
    wide = replace(narrow, parallel=replace(narrow.parallel, grad_reduce="wide"))
    one, other = (run_threads(2, run_steps, each, 3) for each in (narrow, wide))
    assert 0 < largest_gap(one[0], other[0]) < 1e-3
    assert_equal(narrow, replace(narrow, parallel=replace(narrow.parallel, overlap_grad_reduce=False)))


ROUNDING = 2.0**-8  # of a number to bf16, at most, as a part of it
ADDING = 2.0**-20  # of up to 16 terms in fp32
Sums = list[tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]]


def parts_of_a_step(rank: int, config: Config, parts: dict[int, list[torch.Tensor]], *, network: Network) -> Sums:
    """Of each bucket the places that this rank owns, its parts of the sum before rounding, and the sum there."""
    engine, sums = make_engine(rank, config, network=network), list[Any]()
    finish = engine.store.finish_reduce

    def finished() -> torch.Tensor:
        squares = finish()
        for bucket in engine.store.buckets:
            first = bucket.owned[0] - bucket._summed[0]
            ranges = [range(each.offset, each.offset + each.stop - each.start) for each in bucket.owned_segments]
            index = torch.tensor([place for each in ranges for place in each], dtype=torch.long)  # without gaps
            sums.append((index + bucket.owned[0], parts[id(bucket)], bucket.gradients[index + first]))
        return squares

    engine.store.finish_reduce = finished  # type: ignore[method-assign]
    engine.train_step(0, local_batch(config, 0, engine.mesh))
    return sums


@pytest.mark.parametrize(
    ("zero_stage", "dp_shard", "bound"),
    [
        (1, 0, ROUNDING),
        (2, 0, ROUNDING),
        (3, 0, ROUNDING),
        (2, 2, 2 * ROUNDING + ROUNDING**2),
        (3, 2, 2 * ROUNDING + ROUNDING**2),
    ],
)
@pytest.mark.parametrize("grad_reduce", ["bf16", "wide"])
def test_a_sum_is_off_by_no_more_than_is_stated(
    zero_stage: int, dp_shard: int, bound: float, grad_reduce: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any element: a part of the sum of the absolute values of what ranks have, which is nearly reached."""
    parts, real = defaultdict[int, list[torch.Tensor]](list), Bucket.start_reduce

    def start_reduce(self: Bucket, **options: bool) -> None:
        for weight in self.weights:
            weight.finish_sum()
        parts[id(self)].append(self._whole_gradients.double())
        real(self, **options)

    monkeypatch.setattr(Bucket, "start_reduce", start_reduce)
    options = {"zero_stage": zero_stage, "dp_shard": dp_shard, "grad_reduce": grad_reduce}
    made = config("llama", "dp4", **options, **({"zero_whole_kib": 0} if zero_stage > 1 else {}))
    runs = run_threads(4, parts_of_a_step, made, parts)
    allowed, largest = bound * (grad_reduce == "bf16") + ADDING, 0.0
    for of_ranks in zip(*runs, strict=True):
        terms = [part for _, own_parts, _ in of_ranks for part in own_parts]
        assert len(terms) == 4 * (made.train.gradient_accumulation_steps if zero_stage > 1 else 1)
        exact, size = sum(terms), sum(part.abs() for part in terms)
        for owned, _, found in of_ranks:
            gap, most = (found - exact[owned]).abs(), size[owned]
            assert (gap <= allowed * most).all()
            largest = max([largest, *(gap / most.clamp(min=1e-30)).tolist()])
    assert largest > allowed / 4 or grad_reduce == "wide"


def traffic(rank: int, config: Config, *, network: Network) -> dict[str, int]:
    """Bytes by kind of call on the data-parallel group, of one step."""
    engine = make_engine(rank, config, network=network)
    recording_of(engine.mesh).calls.clear()
    engine.train_step(0, local_batch(config, 0, engine.mesh))
    calls = [call for call in recording_of(engine.mesh).calls if call.group == "dp"]
    return {kind: sum(call.num_bytes for call in calls if call.kind == kind) for kind in {call.kind for call in calls}}


def test_a_dry_run_counts_what_travels() -> None:
    narrow, wide = (rank_memory(config("llama", "dp2", grad_reduce=name), 0) for name in ("bf16", "wide"))
    assert narrow.gradients == 2 * wide.gradients
    assert rank_memory(config("llama", "tp1"), 0).gradients == wide.gradients


def test_half_as_much_travels() -> None:
    narrow, wide = (run_threads(2, traffic, config("llama", "dp2", grad_reduce=name))[0] for name in ("bf16", "wide"))
    assert 2 * narrow.pop("all_to_all") == wide.pop("reduce_scatter") > 0
    assert narrow == wide
