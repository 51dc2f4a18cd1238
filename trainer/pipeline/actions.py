"""Action: what one pipeline rank does at one moment; a schedule is a row of actions for each rank.

F is the forward pass of a micro-batch through a stage and B its backward pass. Passes add transfers: SF sends what F
returned to the next stage, RF begins to receive what F reads, SB and RB do the same for gradients and the stage before.
F(s, m) needs F(s - 1, m); B(s, m) needs F(s, m) and B(s + 1, m).
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from threefold.errors import UserError

Kind = Literal["F", "B", "SF", "RF", "SB", "RB"]
PASSES: tuple[Literal["F", "B"], ...] = ("F", "B")  # what computes; other kinds move tensors


class Action(NamedTuple):
    """One micro-batch on one stage; prints as `F3`."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}"


Schedule = Sequence[Sequence[Action]]  # by pipeline rank


def check_sizes(num_stages: int, num_microbatches: int) -> None:
    """Raise UserError if there is nothing to put in order."""
    if num_stages < 1 or num_microbatches < 1:
        raise UserError(
            f"no schedule for {num_stages} stages with {num_microbatches} micro-batches",
            hint="trainer schedule --pp 4 --microbatches 8",
        )


def stage_ranks(schedule: Schedule) -> dict[int, int]:
    """Return the rank of each stage: the one whose row has its passes."""
    return {action.stage: rank for rank, row in enumerate(schedule) for action in row}


def peak_live(row: Sequence[Action]) -> int:
    """Return how many forward passes of a row wait for their backward pass at once, at most.

    F0 F1 B0 F2 B1 B2 has 2. Each holds its activations meanwhile.
    """
    live = peak = 0
    for action in row:
        live += {"F": 1, "B": -1}.get(action.kind, 0)
        peak = max(peak, live)
    return peak
