"""The store: gradients in the wide dtype, stale memory that changes nothing, state that its holders share."""

import itertools
from dataclasses import replace
from typing import Literal

import pytest
import torch

from ckptkit.model.layout import ParallelLayout
from tests.trainer.support.parity import config_for, local_batch, make_engine, run_steps, small, state_bytes
from tests.trainer.support.weights import handle
from trainer.config import Config
from trainer.engine import Engine
from trainer.mesh.group import Network
from trainer.run.stage_times import Nobody
from trainer.verify.threads import run_threads


def test_the_first_contribution_overwrites_and_later_ones_add() -> None:
    weight, gradient = handle(torch.ones(2))
    for step in range(2):
        weight.begin_sum()
        for _ in range(2):
            weight.add_gradient(lambda out, first: out.fill_(3.0) if first else out.add_(3.0))
        weight.finish_sum()
        assert gradient.tolist() == [6.0, 6.0], step


def test_a_weight_without_a_contribution_has_none() -> None:
    weight, gradient = handle(torch.ones(2), contributes=False)
    weight.begin_sum()
    weight.add_gradient(lambda out, first: pytest.fail("another rank contributes it"))
    weight.finish_sum()
    assert gradient.tolist() == [0.0, 0.0]


def test_a_backward_sees_the_values_of_its_forward() -> None:
    weight, _ = handle(torch.ones(2))
    epoch = weight.epoch
    weight.epoch += 1
    with pytest.raises(AssertionError, match="w was updated between a forward and its backward"):
        weight.check(epoch)


def poisoned_steps(rank: int, config: Config, *, network: Network | None = None) -> list[tuple[float, float]]:
    """Two steps, before each of which every gradient buffer is filled with NaN."""
    engine = make_engine(rank, config, network=network)
    stats = []
    for step in range(2):
        for bucket in engine.store.buckets:
            bucket.gradients.fill_(float("nan"))
        stats.append(engine.train_step(step, local_batch(config, step, engine.mesh)))
    return [(each.loss, each.grad_norm) for each in stats]


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        *itertools.product(["llama", "gpt2"], ["tp1", "dp3"]),
        ("gpt2", "tp2-pp2"),
        pytest.param("llama", "tp2-pp2", marks=pytest.mark.slow),
    ],
)
def test_what_gradient_buffers_held_changes_nothing(model: str, layout: str) -> None:
    parsed = ParallelLayout.parse(layout)
    config = small(config_for(model, parsed))
    if layout == "dp3":
        config = replace(config, train=replace(config.train, global_batch_size=12, gradient_accumulation_steps=4))
    clean = run_threads(parsed.world_size, run_steps, config, 2)
    for rank, stats in enumerate(run_threads(parsed.world_size, poisoned_steps, config)):
        assert stats == list(zip(clean[rank]["losses"], clean[rank]["norms"], strict=True))


def live_parameters(rank: int, config: Config, *, network: Network | None = None) -> list[torch.Tensor]:
    """The parameters of a rank after a step, bucket by bucket; asserts that those it updates are its masters."""
    engine = make_engine(rank, config, network=network)
    engine.train_step(0, local_batch(config, 0, engine.mesh))
    engine.store.join_masters()
    for bucket in engine.store.buckets:
        assert torch.equal(bucket.parameters[slice(*bucket.updated)], bucket.master.bfloat16())
    return [bucket.parameters for bucket in engine.store.buckets]


@pytest.mark.parametrize("master", ["wide", "split"])
@pytest.mark.parametrize("zero_stage", [0, 1])
def test_an_update_writes_the_bf16_weights_that_all_holders_have(
    zero_stage: int, master: Literal["wide", "split"]
) -> None:
    config = small(config_for("llama", ParallelLayout(dp=2), precision="bf16", zero_stage=zero_stage))
    config = replace(config, optim=replace(config.optim, master=master))
    first, second = run_threads(2, live_parameters, config)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def bytes_of_rank(rank: int, config: Config, *, network: Network | None = None) -> int:
    return state_bytes(make_engine(rank, config, network=network).store)


@pytest.mark.parametrize("layout", ["dp4", "tp2-dp2", "tp2-pp2", "tp2-dp2-pp2"])
def test_holders_share_the_optimizer_state_norms_included(layout: str) -> None:
    """Two moments of 8 bytes a parameter, over all ranks together: nothing is kept twice."""
    parsed = ParallelLayout.parse(layout)
    config = small(config_for("llama", parsed))
    engine: Engine = make_engine(0, small(config_for("llama", ParallelLayout())))
    num_parameters = sum(values.numel() for _, values in engine.store.values())
    held = run_threads(parsed.world_size, bytes_of_rank, config)
    padding = 64 * 3 * 2 * parsed.world_size * 40  # at most 64 bytes a bucket, holder and state
    assert 0 <= sum(held) - 16 * num_parameters <= padding
    assert sum(held) < 1.3 * 16 * num_parameters


def test_a_step_walks_no_ranks_however_many_hold_a_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(config_for("gpt2", ParallelLayout(dp=8)))
    engine = make_engine(0, config, network=Nobody(8))
    batch, places = local_batch(config, 0, engine.mesh), []
    monkeypatch.setattr(ParallelLayout, "coords", lambda self, rank: places.append(rank))
    engine.train_step(0, batch)
    assert places == [], "what never changes is computed once"
