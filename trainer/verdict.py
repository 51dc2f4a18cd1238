"""The verdict on a step, reached on the device: does it count, and by what are its gradients scaled.

The host reads it when it wants to, a step later for example; until then the device goes on. A step whose loss or
gradient norm is not finite is bad: it changes no state, nor does any step after it. One that something else makes void
changes none either, and the run goes on: with the next batch, or with the same once more. One whose scaled gradients
overflow is void so.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from threefold.errors import UserError
from trainer.config import Config
from trainer.loss_scale import MOST_VOIDS, SIZE, LossScale
from trainer.mesh.clock import Moment


class Outcome(IntEnum):
    """What becomes of a step: of those above COUNTS nothing of the state changes."""

    COUNTS = 0
    SKIPPED = 1  # void: the run goes on with the next batch, at the next step
    REPEATED = 2  # void, and so is each after it until `Verdict.repeat`: the host takes the same batch once more
    BAD = 3  # ends the run
    STUCK = 4  # ends the run: void once too often at the smallest loss scale


@dataclass(frozen=True, slots=True)
class StepStats:
    """One step, in global terms, and this rank's waits.

    `comm_s` is that in collectives, `comm_tp_s`, `comm_cp_s` and `comm_dp_s` parts of it, `bubble_s` that for
    pipeline neighbours.
    """

    loss: float  # of a token, over the global batch
    grad_norm: float  # of the whole gradient, before it was clipped
    lr: float  # of this step
    num_tokens: int  # unmasked tokens of the global batch
    comm_s: float  # waits in all collectives
    comm_tp_s: float  # those along tp among them
    comm_cp_s: float  # those along cp alone among them: the exchanges of attention
    comm_dp_s: float  # those along dp among them
    bubble_s: float  # waits for pipeline neighbours
    forward_s: float  # in forward passes, collectives among them
    backward_s: float  # in backward passes, and in what they put off
    update_s: float  # in the optimizer's update, beside which the next forward may run
    outcome: Outcome = Outcome.COUNTS
    voids: int = 0  # steps until then that the run went on after
    scale: tuple[float, ...] = ()  # the state of the loss scale behind it: see `LossScale`; empty if nothing is scaled
    loads: tuple[float, ...] = ()  # of experts and their ranks: see `Balance`
    shares: tuple[float, ...] = ()  # of values in eight bits, if they were counted: see `CastCounts`
    squares: tuple[float, ...] = ()  # of gradients and weights, if they were asked for: see `LayerNorms`

    @property
    def of_experts(self) -> dict[str, Any]:
        """Return the fields of a step's line that are of experts, if there are any."""
        names = ("expert_load", "idle_experts", "rank_load", "rank_rows")
        return dict(zip(names, self.loads))

    @property
    def extras(self) -> dict[str, Any]:
        """Return the fields of a step's line that only some runs have."""
        scaled = {"loss_scale": self.scale[0], "void_steps": self.voids} if self.scale else {}
        num_layers = len(self.shares) // 2
        names = {"fp8_saturated": self.shares[:num_layers], "fp8_zero": self.shares[num_layers:]}
        return self.of_experts | scaled | (names if self.shares else {})


class PendingStats:
    """The statistics of a step that the device may not have done yet."""

    def __init__(
        self,
        numbers: Tensor,
        lr: float,
        waits: Callable[[], dict[str, float]],
        note: Callable[[int], None] = lambda voids: None,
        others: tuple[Tensor, ...] = (),
    ) -> None:
        """Begin to copy the numbers of a Verdict and the others: loads of experts, shares of casts, squared norms.

        `waits` returns the waits of the step once it is done; `note` takes the voids that are read.
        """
        self._numbers, self._lr, self._waits = on_host_later(torch.cat([numbers, *others])), lr, waits
        self._note, self._sizes = note, [len(other) for other in others]
        self.ended = Moment(numbers.device)

    def read(self) -> StepStats:
        """Wait for the step; raise UserError if it, or one before it, is bad."""
        self.ended.wait()
        step, loss, norm, num_tokens, outcome, voids, *others = self._numbers.tolist()
        scale, rest = others[:SIZE], iter(others[SIZE:])
        loads, shares, squares = (tuple(islice(rest, size)) for size in (*self._sizes, 0, 0, 0)[:3])
        if outcome == Outcome.STUCK:
            raise UserError(
                f"step {int(step)}: gradients overflowed in {MOST_VOIDS} steps in a row at the smallest loss scale, "
                f"{scale[0]:g}",
                hint="--bf16, whose numbers have a wider range; or a smaller --min-loss-scale or --loss-scale",
            )
        if outcome == Outcome.BAD:
            raise UserError(
                f"step {int(step)}: the loss is {loss}, the gradient norm {norm}",
                hint="lower --lr, or train the step in a wider --train.precision",
            )
        self._note(int(voids))
        waits = self._waits()
        comms = [waits.get(f"comm_{cause}", 0.0) for cause in ("tp", "cp", "dp", "world")]
        tp_s, cp_s, dp_s, _ = comms
        waited = {"comm_s": sum(comms), "comm_tp_s": tp_s, "comm_cp_s": cp_s, "comm_dp_s": dp_s}
        spans = {"bubble": ["bubble"], "forward": ["F"], "backward": ["B", "W"], "update": ["update"]}
        passed = {f"{name}_s": sum(waits.get(span, 0.0) for span in parts) for name, parts in spans.items()}
        return StepStats(
            loss, norm, self._lr, int(num_tokens), **waited, **passed, outcome=Outcome(int(outcome)), voids=int(voids),
            scale=tuple(scale if scale[0] else ()), loads=loads, shares=shares, squares=squares,
        )  # fmt: skip


def on_host_later(numbers: Tensor) -> Tensor:
    """Begin to copy numbers to the host; those of a step that has only shapes are nowhere."""
    return numbers if numbers.is_meta else numbers.to("cpu", non_blocking=True)


class Verdict:
    """Judges steps on a device, the same on all ranks; owned by the training thread.

    `numbers` are [step, loss, gradient norm, tokens, outcome, voids] of the last step judged, and behind them the state
    of the loss scale, zeros if there is none. After one that is to be repeated, or is bad, they stay, and no later step
    counts. `is_void` is 1.0 if that step changes no state. `voids` are the steps that a run went on after: so many
    fewer updates than steps are made, which AdamW counts.

    `causes` are what makes a step void: each takes loss and norm, and returns 0 or an outcome, as a number on the
    device that is the same on all ranks. What is void is not bad.
    """

    def __init__(self, device: torch.device, clip: float, loss_scale: LossScale | None = None) -> None:
        self._clip, self.loss_scale = clip, loss_scale
        self.causes: list[Callable[[Tensor, Tensor], Tensor]] = [] if loss_scale is None else [self._overflow]
        self.numbers = torch.zeros(6 + SIZE, dtype=torch.float64, device=device)
        self.is_void = torch.zeros((), device=device)
        self.known_voids, self._num_judged, self._num_read = 0, 0, 0
        self.begin(0)

    @classmethod
    def of(cls, config: Config, device: torch.device) -> "Verdict":
        """Return that of a run, which clips its gradients and maybe scales its loss."""
        return cls(device, config.optim.clip, LossScale.of(config.train))

    def begin(self, voids: int, scale: Sequence[float] = ()) -> None:
        """Begin after so many void steps, with the state of the loss scale, as a restored state has them."""
        state = self.loss_scale.start(scale) if self.loss_scale is not None else [0.0] * SIZE
        self.numbers = self.numbers.new_tensor([0.0] * 5 + [voids, *state])
        self.known_voids, self._num_read = voids, self._num_judged

    @property
    def scale(self) -> Tensor | float:
        """Return the loss scale that the last step left; 1 if nothing is scaled."""
        return self.numbers[6] if self.loss_scale is not None else 1.0

    def scaled(self, factor: Tensor) -> Tensor:
        """Return the factor of a token's loss times the loss scale that the last step left."""
        return factor * self.scale if self.loss_scale is not None else factor

    def judge(self, step: int, loss: Tensor, squares: Tensor, num_tokens: Tensor) -> Tensor:
        """Judge the step of this number; return the factor for its gradients, float64 [].

        `squares` are squared norms whose sum is that of all gradients; `clip` bounds its root, 0 bounds nothing.
        """
        norm, voids, scale = squares.sum().sqrt(), self.numbers[5], self.numbers[6:]
        after = scale
        if self.loss_scale is not None:
            loss, norm = loss / scale[0], norm / scale[0]
            after = self.loss_scale.after(scale, torch.isfinite(norm).logical_not())
        outcome = torch.isfinite(loss + norm).logical_not().to(loss.dtype) * Outcome.BAD
        for cause in self.causes:
            found = cause(loss, norm).to(loss.dtype)
            outcome = torch.where(found > 0, found, outcome)
        if self.causes:
            voids = voids + (outcome == Outcome.SKIPPED)
        judged = torch.stack([torch.full_like(loss, step), loss, norm, num_tokens, outcome, voids])
        numbers = torch.cat([judged, torch.where(outcome == Outcome.REPEATED, scale, after)])
        self.numbers = torch.where(self.numbers[4] >= Outcome.REPEATED, self.numbers, numbers)
        self.is_void = (self.numbers[4] > 0).float()
        self._num_judged += 1
        factor = self._clip / norm.clamp(min=self._clip) if self._clip else torch.ones_like(norm)
        return factor / scale[0] if self.loss_scale is not None else factor

    def _overflow(self, loss: Tensor, norm: Tensor) -> Tensor:
        assert self.loss_scale is not None, "a cause of scaled gradients"
        is_last = self.loss_scale.is_last(self.numbers[6:])
        outcome = torch.where(is_last, float(Outcome.STUCK), float(Outcome.SKIPPED))
        return torch.where(torch.isfinite(norm), 0.0, outcome)

    def repeat(self) -> None:
        """Let steps count again after one that is to be repeated; those that were started after it did not count."""
        self.begin(self.known_voids, self.numbers[6:].tolist())

    def late_voids(self) -> tuple[Tensor, int] | None:
        """Return how many voids the device has that the host has not read, and their most; None if there are none."""
        most = self._num_judged - 1 - self._num_read if self.causes else 0
        return (self.numbers[5] - self.known_voids, most) if most else None

    def noting(self) -> Callable[[int], None]:
        """Return what takes the voids that were read of the step judged last."""
        number = self._num_judged

        def note(voids: int) -> None:
            self.known_voids, self._num_read = voids, number

        return note
