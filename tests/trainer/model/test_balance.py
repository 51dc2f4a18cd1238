"""What spreads tokens over experts: biases that move by the counts of all ranks, losses of micro-batches and rows."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.trainer.support.moe import engine_of, mixture
from tests.trainer.support.parity import assert_parity, local_batch, run_steps
from trainer.config import Config
from trainer.config.resolve import layout_of
from trainer.verdict import Outcome
from trainer.verify.threads import run_threads

SLOW = [pytest.mark.slow, pytest.mark.ci]
WAYS: list[dict[str, Any]] = [
    {"moe_balance": "bias", "moe_bias_rate": 0.05},
    {"moe_balance": "aux", "moe_aux_coeff": 0.3, "moe_z_loss": 0.02},
    {"moe_balance": "seq_aux", "moe_aux_coeff": 0.3},
]


def balanced(name: str, layout: str, way: dict[str, Any], **options: Any) -> Config:
    config = mixture(name, layout, **options)
    return replace(config, model=replace(config.model, **way))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way["moe_balance"])
@pytest.mark.parametrize(
    ("name", "layout", "parallel"),
    [
        ("plain", "tp2", {}),
        pytest.param("shared", "tp2", {"sequence_parallel": "off"}, marks=SLOW),
        pytest.param("shared", "tp2-cp2-dp2", {"zero_stage": 3, "zero_whole_kib": 0}, marks=SLOW),
        pytest.param("plain", "cp2-dp2", {"cp_method": "allgather"}, marks=SLOW),
        pytest.param("every second", "pp2", {"schedule": "zb-h1"}, marks=SLOW),
    ],
)
def test_a_layout_repeats_one_process(name: str, layout: str, parallel: dict[str, Any], way: dict[str, Any]) -> None:
    """With as many rows a micro-batch, on which the losses depend."""
    config = balanced(name, layout, way, **parallel)
    reference = run_steps(0, balanced(name, "tp1", way), 2)
    runs = run_threads(layout_of(config).world_size, run_steps, config, 2)
    assert_parity(runs, reference)
    for run in runs:
        for bias, values in run["biases"].items():
            assert torch.equal(values, reference["biases"][bias]), bias


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way["moe_balance"])
def test_made_again_and_other_orders_have_equal_bits(way: dict[str, Any]) -> None:
    """Counts and losses leave out what the backward makes again."""
    expected = run_steps(0, balanced("plain", "tp1", way), 2)
    again = run_steps(0, balanced("plain", "tp1", way, train={"recompute": "full"}), 2)
    assert (again["losses"], again["norms"]) == (expected["losses"], expected["norms"])
    for name, values in expected["biases"].items():
        assert torch.equal(values, again["biases"][name])


def test_biases_move_toward_the_mean_and_void_steps_leave_them() -> None:
    config = balanced("plain", "tp1", WAYS[0])
    engine = engine_of(config, router=0.0)  # the first two experts take all tokens
    batch = local_batch(config, 0, engine.mesh)
    stats = engine.train_step(0, batch)
    expected = 0.05 * torch.tensor([-1.0, -1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    assert torch.equal(engine.balance.bias_LE, expected.repeat(4, 1))
    assert stats.loads[0] == 2.5, "each has half of the rows, the mean is a fifth"
    engine.eval_batch(batch)
    assert not engine.balance._is_step
    engine.verdict.causes.append(lambda loss, norm: torch.full_like(loss, Outcome.SKIPPED))
    engine.train_step(1, batch)
    assert torch.equal(engine.balance.bias_LE, expected.repeat(4, 1))


def test_an_expert_is_idle_after_a_hundred_steps() -> None:
    config = mixture("plain")
    balance = engine_of(config).balance
    for step in range(100):
        balance.begin_step(step)
        for layer in range(4):
            balance.count(layer, torch.tensor([[0, 1], [2, 1]]))
        balance.update(balance.counts_LE.flatten(), torch.zeros(()))
        assert balance.loads[1] == (8 if step == 99 else 0)
    assert balance.loads[0] == 2.5
