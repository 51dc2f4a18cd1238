"""The verdict on a step: how gradients are scaled, and that nothing changes from the first bad step on."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ckptkit.model.layout import ParallelLayout
from tests.trainer.support.parity import config_for, local_batch, make_engine, small
from threefold.errors import UserError
from trainer.store.store import ParameterStore
from trainer.verdict import PendingStats, Verdict

CPU = torch.device("cpu")


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def read(verdict: Verdict) -> tuple[float, float, int]:
    stats = PendingStats(verdict.numbers, 0.5, lambda: {"comm_tp": 2.0, "comm_world": 1.0}).read()
    assert (stats.lr, stats.comm_s, stats.comm_tp_s, stats.comm_dp_s, stats.bubble_s) == (0.5, 3.0, 2.0, 0.0, 0.0)
    return stats.loss, stats.grad_norm, stats.num_tokens


@pytest.mark.parametrize(("clip", "factor"), [(2.5, 0.5), (5.0, 1.0), (7.0, 1.0), (0.0, 1.0)])
def test_gradients_are_scaled_to_the_clip(clip: float, factor: float) -> None:
    verdict = Verdict(CPU, clip)
    assert verdict.judge(1, f64(3.0)[0], f64(9.0, 0.0, 16.0), f64(12)[0]) == factor
    assert read(verdict) == (3.0, 5.0, 12)
    assert verdict.is_bad == 0


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize(("loss", "square"), [(float("nan"), 1.0), (float("inf"), 1.0), (1.0, float("inf"))])
def test_the_first_bad_step_is_named_for_ever(loss: float, square: float, clip: float) -> None:
    verdict = Verdict(CPU, clip)
    verdict.judge(6, f64(1.0)[0], f64(1.0), f64(3)[0])
    for number, values in enumerate([(loss, square), (1.0, 1.0), (float("nan"), 1.0)], 7):
        verdict.judge(number, f64(values[0])[0], f64(values[1]), f64(3)[0])
        assert verdict.is_bad == 1
        with pytest.raises(UserError, match=f"step 7: the loss is {loss}, the gradient norm {square}"):
            read(verdict)


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_after_a_bad_step_no_state_changes(precision: str) -> None:
    config = small(config_for("llama", ParallelLayout(), precision=precision))
    engine = make_engine(0, config)
    batch = local_batch(config, 0, engine.mesh)
    engine.train_step(0, batch)
    before = [each.clone() for each in states(engine.store)]
    bad = engine.start_step(1, replace(batch, loss_mask=batch.loss_mask * float("nan")))
    good = engine.start_step(2, batch)
    for stats in (bad, good):
        with pytest.raises(UserError, match="step 2: the loss is nan"):
            stats.read()
    assert all(torch.equal(now, then) for now, then in zip(states(engine.store), before, strict=True))


def states(store: ParameterStore) -> list[Tensor]:
    return [state for bucket in store.buckets for state in (bucket.parameters, bucket.master, *bucket.states.values())]
