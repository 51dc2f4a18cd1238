"""The learning-rate schedule; AdamW itself is compared with plain training in test_engine."""

import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.config import OptimConfig
from trainer.config.optim import Schedule, Shape
from trainer.store.lr import learning_rate

OPTIM = OptimConfig(lr=1e-2, min_lr=1e-3, warmup_steps=4, decay_steps=14)
KINDS, SHAPES = get_args(Schedule), get_args(Shape)
STYLES = {"wsd": "WSD", "inverse-sqrt": "inverse-square-root"}  # as Megatron-LM calls them


def test_rates_by_hand() -> None:
    rates = [learning_rate(OPTIM, step) for step in (0, 1, 3, 4, 9, 14, 1000)]
    assert rates == pytest.approx([2.5e-3, 5e-3, 1e-2, 1e-2, 5.5e-3, 1e-3, 1e-3])


def test_without_warm_up_the_first_step_has_the_peak() -> None:
    assert learning_rate(OptimConfig(lr=1e-2, min_lr=0, decay_steps=10), 0) == 1e-2


@pytest.mark.parametrize(
    ("kind", "shape", "expected"),
    [  # steps 4, 8, 12, 16, 19, 20, 100 of a warm-up of 4 and an end at 20, the fall of wsd over 8
        ("linear", "linear", [1.0, 0.8, 0.6, 0.4, 0.25, 0.2, 0.2]),
        ("cosine", "linear", [1.0, 0.2 + 0.4 * (1 + math.sqrt(0.5)), 0.6, 0.2 + 0.4 * (1 - math.sqrt(0.5)), 0.2 + 0.4 *
                              (1 + math.cos(math.pi * 15 / 16)), 0.2, 0.2]),
        ("constant", "linear", [1.0] * 7),
        ("inverse-sqrt", "linear", [1.0, 0.5**0.5, 3**-0.5, 0.5, (4 / 19) ** 0.5, 0.2**0.5, 0.2]),
        ("wsd", "linear", [1.0, 1.0, 1.0, 0.6, 0.3, 0.2, 0.2]),
        ("wsd", "sqrt", [1.0, 1.0, 1.0, 0.2 + 0.8 * (1 - math.sqrt(0.5)), 0.2 + 0.8 * (1 - 0.875**0.5), 0.2, 0.2]),
        ("wsd", "cosine", [1.0, 1.0, 1.0, 0.6, 0.2 + 0.4 * (1 + math.cos(math.pi * 7 / 8)), 0.2, 0.2]),
        ("wsd", "exponential", [1.0, 1.0, 1.0, 0.2 + 0.8 * (math.sqrt(2) - 1), 0.2 + 0.8 * (2 * 0.5**0.875 - 1), 0.2,
                                0.2]),
    ],
)  # fmt: skip
def test_each_schedule_by_hand(kind: Schedule, shape: Shape, expected: list[float]) -> None:
    optim = OptimConfig(
        lr=1.0, min_lr=0.2, warmup_steps=4, decay_steps=20, schedule=kind, wsd_decay=shape, wsd_decay_steps=8
    )
    assert [learning_rate(optim, step) for step in (4, 8, 12, 16, 19, 20, 100)] == pytest.approx(expected, rel=1e-12)
    assert [learning_rate(optim, step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]


@given(
    st.sampled_from(KINDS), st.sampled_from(SHAPES), st.integers(0, 20), st.integers(0, 50), st.floats(0, 1),
    st.integers(0, 60),
)  # fmt: skip
def test_the_rate_rises_to_the_peak_then_falls_to_the_minimum(
    kind: Schedule, shape: Shape, warmup: int, span: int, lowest: float, fall: int
) -> None:
    optim = OptimConfig(
        lr=1.0, min_lr=lowest, warmup_steps=warmup, decay_steps=warmup + span, schedule=kind, wsd_decay=shape,
        wsd_decay_steps=min(fall, span),
    )  # fmt: skip
    rates = [learning_rate(optim, step) for step in range(warmup + span + 3)]
    assert rates[: warmup + 1] == sorted(rates[: warmup + 1])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert max(rates) <= 1.0
    assert rates[-1] == pytest.approx(1.0 if kind == "constant" else lowest)


@given(st.sampled_from(SHAPES), st.integers(0, 40), st.integers(1, 30), st.sampled_from(KINDS))
def test_a_cool_down_begins_at_the_rate_that_is_and_ends_at_the_minimum(
    shape: Shape, first: int, span: int, kind: Schedule
) -> None:
    plain = {"lr": 1.0, "min_lr": 1e-3, "warmup_steps": 5, "decay_steps": 40, "schedule": kind, "wsd_decay_steps": 8,
             "wsd_decay": shape}  # fmt: skip
    before = OptimConfig(**plain)  # type: ignore[arg-type]
    cooled = OptimConfig(**plain, cool_down_steps=span, cool_down_from=first)  # type: ignore[arg-type]
    assert [learning_rate(cooled, step) for step in range(first)] == [learning_rate(before, n) for n in range(first)]
    assert learning_rate(cooled, first) == pytest.approx(learning_rate(before, first), rel=1e-12)
    assert learning_rate(cooled, first + span) == learning_rate(cooled, first + span + 9) == pytest.approx(1e-3)
    rates = [learning_rate(cooled, first + done) for done in range(span + 1)]
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("warmup", [0, 7])
def test_each_rate_is_that_of_megatron_core(kind: Schedule, shape: Shape, warmup: int) -> None:
    name = "megatron.core.optimizer_param_scheduler"
    scheduler = pytest.importorskip(name, reason="needs megatron-core: pip install megatron-core --no-deps")
    torch = pytest.importorskip("torch")
    group = {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.0, "max_lr": 3e-3, "min_lr": 2e-4}
    megatron = scheduler.OptimizerParamScheduler(
        torch.optim.SGD([group], lr=0.0), init_lr=0.0, max_lr=3e-3, min_lr=2e-4, lr_warmup_steps=warmup,
        lr_decay_steps=60, lr_decay_style=STYLES.get(kind, kind), start_wd=0.1, end_wd=0.1, wd_incr_steps=60,
        wd_incr_style="constant", wsd_decay_steps=20,
        lr_wsd_decay_style={"sqrt": "minus_sqrt"}.get(shape, shape),
    )  # fmt: skip
    config = OptimConfig(
        lr=3e-3, min_lr=2e-4, warmup_steps=warmup, decay_steps=60, schedule=kind, wsd_decay=shape, wsd_decay_steps=20
    )
    expected = []
    for _ in range(70):
        expected.append(megatron.get_lr(megatron.optimizer.param_groups[0]))
        megatron.step(1)
    rates = [learning_rate(config, step) for step in range(70)]
    assert rates[warmup:] == pytest.approx(expected[warmup:], rel=1e-12)
    assert rates[:warmup] == pytest.approx(expected[1 : warmup + 1], rel=1e-12)  # theirs begins at 0
