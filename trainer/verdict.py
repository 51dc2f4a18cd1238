"""The verdict on a step, reached on the device: does it count, and by what are its gradients scaled.

The host reads it when it wants to, a step later for example; until then the device goes on. A step whose loss or
gradient norm is not finite changes no state, nor does any step after it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from threefold.errors import UserError
from trainer.mesh.clock import Moment


@dataclass(frozen=True, slots=True)
class StepStats:
    """One step, in global terms, and this rank's waits.

    `comm_s` is that in collectives, `comm_tp_s` and `comm_dp_s` parts of it, `bubble_s` that for pipeline neighbours.
    """

    loss: float  # of a token, over the global batch
    grad_norm: float  # of the whole gradient, before it was clipped
    lr: float  # of this step
    num_tokens: int  # unmasked tokens of the global batch
    comm_s: float  # waits in all collectives
    comm_tp_s: float  # those along tp among them
    comm_dp_s: float  # those along dp among them
    bubble_s: float  # waits for pipeline neighbours


class PendingStats:
    """The statistics of a step that the device may not have done yet."""

    def __init__(self, numbers: Tensor, lr: float, waits: Callable[[], dict[str, float]]) -> None:
        """Begin to copy the numbers of a Verdict; `waits` returns the waits of the step once it is done."""
        self._numbers, self._lr, self._waits = numbers.to("cpu", non_blocking=True), lr, waits
        self.ended = Moment(numbers.device)

    def read(self) -> StepStats:
        """Wait for the step; raise UserError if it, or one before it, did not count."""
        self.ended.wait()
        step, loss, norm, num_tokens, is_bad = self._numbers.tolist()
        if is_bad:
            raise UserError(
                f"step {int(step)}: the loss is {loss}, the gradient norm {norm}",
                hint="lower --lr, or train the step in a wider --train.precision",
            )
        waits = self._waits()
        tp_s, dp_s, world_s, bubble_s = (
            waits.get(cause, 0.0) for cause in ("comm_tp", "comm_dp", "comm_world", "bubble")
        )
        return StepStats(loss, norm, self._lr, int(num_tokens), tp_s + dp_s + world_s, tp_s, dp_s, bubble_s)


class Verdict:
    """Judges steps on a device, the same on all ranks; owned by the training thread.

    `is_bad` is 1.0, and stays so, once a step did not count, else 0.0. `numbers` are [step, loss, gradient norm,
    tokens, is_bad] of the last step judged, or of the first that did not count.
    """

    def __init__(self, device: torch.device, clip: float) -> None:
        self._clip = clip
        self.numbers = torch.zeros(5, dtype=torch.float64, device=device)
        self.is_bad = torch.zeros((), device=device)

    def judge(self, step: int, loss: Tensor, squares: Tensor, num_tokens: Tensor) -> Tensor:
        """Judge the step of this number; return the factor for its gradients, float64 [].

        `squares` are squared norms whose sum is that of all gradients; `clip` bounds its root, 0 bounds nothing.
        """
        norm = squares.sum().sqrt()
        is_bad = torch.isfinite(loss + norm).logical_not()
        numbers = torch.stack([torch.full_like(loss, step), loss, norm, num_tokens, is_bad.to(loss.dtype)])
        self.numbers = torch.where(self.is_bad > 0, self.numbers, numbers)
        self.is_bad = self.numbers[-1].float()
        return self._clip / norm.clamp(min=self._clip) if self._clip else torch.ones_like(norm)
