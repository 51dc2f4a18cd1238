"""The verdict on a step: how gradients are scaled, and that nothing changes from the first bad step on."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ckptkit.model.layout import ParallelLayout
from tests.trainer.support.parity import config_for, local_batch, make_engine, small
from tests.trainer.support.void_faults import Causes, flat_config, require_same, states, trained, void_in_the_middle
from threefold.errors import UserError
from trainer.verdict import Outcome, PendingStats, Verdict

CPU = torch.device("cpu")


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def read(verdict: Verdict) -> tuple[float, float, int]:
    stats = PendingStats(verdict.numbers, 0.5, lambda: {"comm_tp": 2.0, "comm_cp": 0.5, "comm_world": 1.0}).read()
    assert (stats.lr, stats.comm_s, stats.comm_tp_s, stats.comm_cp_s) == (0.5, 3.5, 2.0, 0.5)
    assert (stats.comm_dp_s, stats.bubble_s) == (0.0, 0.0)
    return stats.loss, stats.grad_norm, stats.num_tokens


@pytest.mark.parametrize(("clip", "factor"), [(2.5, 0.5), (5.0, 1.0), (7.0, 1.0), (0.0, 1.0)])
def test_gradients_are_scaled_to_the_clip(clip: float, factor: float) -> None:
    verdict = Verdict(CPU, clip)
    assert verdict.judge(1, f64(3.0)[0], f64(9.0, 0.0, 16.0), f64(12)[0]) == factor
    assert read(verdict) == (3.0, 5.0, 12)
    assert verdict.is_void == 0


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize(("loss", "square"), [(float("nan"), 1.0), (float("inf"), 1.0), (1.0, float("inf"))])
def test_the_first_bad_step_is_named_for_ever(loss: float, square: float, clip: float) -> None:
    verdict = Verdict(CPU, clip)
    verdict.judge(6, f64(1.0)[0], f64(1.0), f64(3)[0])
    for number, values in enumerate([(loss, square), (1.0, 1.0), (float("nan"), 1.0)], 7):
        verdict.judge(number, f64(values[0])[0], f64(values[1]), f64(3)[0])
        assert verdict.is_void == 1
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


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(("precision", "form"), [("fp64", "csrc"), ("bf16", "csrc"), ("fp32", "torch")])
def test_a_void_step_changes_nothing_and_is_no_update(precision: str, form: str, *, is_late: bool) -> None:
    engine = void_in_the_middle(precision, form, is_late=is_late)
    assert engine.verdict.numbers[5] == 2


def test_what_is_read_of_a_void_step_is_its_own() -> None:
    config = flat_config("fp64", "csrc")
    engine = make_engine(0, config)
    engine.verdict.causes.append(Causes(Outcome.SKIPPED, 2))
    found = [engine.train_step(step, local_batch(config, step, engine.mesh)) for step in range(3)]
    assert [(stats.outcome, stats.voids) for stats in found] == [
        (Outcome.COUNTS, 0), (Outcome.SKIPPED, 1), (Outcome.COUNTS, 1)
    ]  # fmt: skip
    assert all(stats.loss > 0 and stats.grad_norm > 0 for stats in found)


def test_a_void_step_with_a_loss_that_is_not_finite_is_not_bad() -> None:
    verdict = Verdict(CPU, 1.0)
    verdict.causes.append(lambda loss, norm: torch.isfinite(norm).logical_not() * Outcome.SKIPPED)
    verdict.judge(1, f64(float("nan"))[0], f64(float("inf")), f64(3)[0])
    assert (PendingStats(verdict.numbers, 0.5, dict).read().outcome, float(verdict.is_void)) == (Outcome.SKIPPED, 1.0)
    verdict.judge(2, f64(1.0)[0], f64(1.0), f64(3)[0])
    assert (PendingStats(verdict.numbers, 0.5, dict).read().voids, float(verdict.is_void)) == (1, 0.0)


def test_nothing_counts_until_a_step_is_repeated() -> None:
    config = flat_config("fp64", "csrc")
    engine = make_engine(0, config)
    engine.verdict.causes.append(Causes(Outcome.REPEATED, 2))
    batches = [local_batch(config, number, engine.mesh) for number in range(4)]
    engine.train_step(0, batches[0])
    pending = [engine.start_step(step, batches[step]) for step in (1, 2)]
    assert [stats.read().outcome for stats in pending] == [Outcome.REPEATED] * 2
    engine.verdict.repeat()
    for step in (1, 2, 3):
        assert engine.train_step(step, batches[step]).outcome is Outcome.COUNTS
    require_same(engine, trained(config, [0, 1, 2, 3], None, is_late=False))
