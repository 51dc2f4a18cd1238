"""A spike is a loss far above those before it; each is seen once, and a loss that falls or wavers has none."""

import math
import random

from trainer.observe.spikes import LEAST, Spikes


def steps_seen(losses: list[float]) -> list[int]:
    spikes = Spikes()
    return [step for step, loss in enumerate(losses) if spikes.seen(loss)]


def noisy(number: int, *, around: float = 2.4) -> list[float]:
    draw = random.Random(3)
    return [around + draw.gauss(0, 0.01) for _ in range(number)]


def test_a_spike_of_several_steps_is_seen_once() -> None:
    losses = noisy(200)
    losses[100:103] = [3.1, 3.4, 2.9]
    assert steps_seen(losses) == [100]


def test_a_loss_that_falls_wavers_or_is_not_finite_has_none() -> None:
    assert steps_seen([8 / (1 + step / 20) + noise for step, noise in enumerate(noisy(500, around=0.0))]) == []
    assert steps_seen([*noisy(100), math.nan, math.inf, *noisy(100)]) == []
    assert steps_seen([2.4] * 100 + [2.41] * 100) == []  # far by deviations, and little


def test_too_few_losses_say_nothing() -> None:
    assert steps_seen([*noisy(LEAST - 1), 9.0]) == []


def test_a_new_level_is_what_others_are_compared_with() -> None:
    losses = [*noisy(100), *noisy(200, around=5.0)]
    losses[250] = 9.0
    assert steps_seen(losses) == [100, 250]
