"""The loss scale: what fp16 multiplies the loss by, so that its gradients are not too small to be written.

Gradients are divided by it again, in fp32, before the norm and the update. A step whose gradients overflow is void.
Of a dynamic scale such steps halve it, once `hysteresis` of them were since it last grew, and `window` steps in a row
that count double it. For example from 65,536 with hysteresis 2: the first overflow leaves it, the second makes it
32,768. Source: Micikevicius and others, 2018 (arXiv 1710.03740); hysteresis is Megatron-LM's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.config import TrainConfig

LARGEST = 2.0**127  # the last power of two that fp32 has
MOST_VOIDS = 10  # steps in a row that may overflow at the smallest scale: the last of them ends the run
NAMES = ("scale", "good_steps", "overflows_left", "voids_at_smallest")  # the state, as a step records it
SIZE = len(NAMES)


@dataclass(frozen=True, slots=True)
class LossScale:
    """How the scale moves, from a state to the next: numbers on a device, which no host reads to go on.

    The state is [scale, steps that counted since it moved, overflows until it is halved, voids in a row at the
    smallest].
    """

    initial: float
    smallest: float
    largest: float
    window: int
    hysteresis: int

    @classmethod
    def of(cls, train: TrainConfig) -> "LossScale | None":
        """Return that of a run; None if nothing is scaled."""
        if train.precision != "fp16":
            return None
        window, hysteresis = train.loss_scale_window, train.hysteresis
        if (fixed := train.loss_scale) is not None:
            return cls(fixed, fixed, fixed, window, hysteresis)
        return cls(train.initial_loss_scale, train.min_loss_scale, LARGEST, window, hysteresis)

    def start(self, state: Sequence[float] = ()) -> list[float]:
        """Return the state that a run begins with, or goes on with where a step recorded its own."""
        if not state:
            return [self.initial, 0.0, float(self.hysteresis), 0.0]
        scale, *counts = state
        return [min(max(scale, self.smallest), self.largest), *counts]

    def is_last(self, state: Tensor) -> Tensor:
        """Return whether a step that overflows is the last that may."""
        scale, _, _, voids = state.unbind()
        return (scale <= self.smallest) & (voids + 1 >= MOST_VOIDS)

    def after(self, state: Tensor, overflows: Tensor) -> Tensor:
        """Return the state after a step that `overflows`, or counts."""
        scale, good_steps, left, voids = state.unbind()
        zero = torch.zeros_like(scale)
        fewer = (left - 1).clamp(min=0)
        halved = torch.where(fewer > 0, scale, (scale / 2).clamp(min=self.smallest))
        void = torch.stack([halved, zero, fewer, torch.where(scale <= self.smallest, voids + 1, zero)])
        grows = good_steps + 1 >= self.window
        doubled = torch.where(grows, (scale * 2).clamp(max=self.largest), scale)
        full = torch.where(grows, float(self.hysteresis), left)
        good = torch.stack([doubled, torch.where(grows, zero, good_steps + 1), full, zero])
        return torch.where(overflows, void, good)


def recorded(state: Sequence[float]) -> dict[str, Any]:
    """Return what a step's metadata have of a state: nothing if it is empty."""
    return {"loss_scale": dict(zip(NAMES, state, strict=True))} if state else {}


def recorded_in(metadata: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the state that a step's metadata have, empty if they have none that is whole."""
    values = metadata.get("loss_scale")
    state = [values.get(name) for name in NAMES] if isinstance(values, Mapping) else []
    whole = tuple(float(number) for number in state if isinstance(number, int | float) and 0 <= number <= LARGEST)
    return whole if len(whole) == SIZE else ()
