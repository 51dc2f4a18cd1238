"""The learning-rate schedule; AdamW itself is compared with plain training in test_engine."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.config import OptimConfig
from trainer.store.lr import learning_rate

OPTIM = OptimConfig(lr=1e-2, min_lr=1e-3, warmup_steps=4, decay_steps=14)


def test_rates_by_hand() -> None:
    rates = [learning_rate(OPTIM, step) for step in (0, 1, 3, 4, 9, 14, 1000)]
    assert rates == pytest.approx([2.5e-3, 5e-3, 1e-2, 1e-2, 5.5e-3, 1e-3, 1e-3])


def test_without_warm_up_the_first_step_has_the_peak() -> None:
    assert learning_rate(OptimConfig(lr=1e-2, min_lr=0, decay_steps=10), 0) == 1e-2


@given(warmup=st.integers(0, 20), span=st.integers(0, 50), lowest=st.floats(0, 1))
def test_the_rate_rises_to_the_peak_then_falls_to_the_minimum(warmup: int, span: int, lowest: float) -> None:
    optim = OptimConfig(lr=1.0, min_lr=lowest, warmup_steps=warmup, decay_steps=warmup + span)
    rates = [learning_rate(optim, step) for step in range(warmup + span + 3)]
    assert rates[: warmup + 1] == sorted(rates[: warmup + 1])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert max(rates) <= 1.0
    assert rates[-1] == pytest.approx(lowest)
