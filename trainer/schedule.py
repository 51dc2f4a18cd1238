"""Pipeline schedules as data: for each stage the order of its forward and backward passes.

What must travel follows from it: F(m) needs the activations of micro-batch m from the stage before, B(m) the
gradients from the stage after. At most `num_stages` sends to a neighbour are under way; no schedule here needs more.
Sources: GPipe (Huang et al., 2019), 1F1B (PipeDream-flush, Narayanan et al., 2021).
"""

from typing import Literal, NamedTuple

from threefold.errors import UserError


class Action(NamedTuple):
    """One pass of one micro-batch: "F" forward, "B" backward."""

    kind: Literal["F", "B"]
    microbatch: int


def gpipe(stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """Return all forwards, then all backwards: every micro-batch is live at once."""
    _check(stage, num_stages, num_microbatches)
    return [Action(kind, m) for kind in ("F", "B") for m in range(num_microbatches)]


def one_f_one_b(stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """Warm up, then alternate: at most `num_stages - stage` micro-batches are live."""
    _check(stage, num_stages, num_microbatches)
    num_warmup = min(num_stages - stage - 1, num_microbatches)
    actions = [Action("F", m) for m in range(num_warmup)]
    for m in range(num_microbatches - num_warmup):
        actions += [Action("F", m + num_warmup), Action("B", m)]
    return actions + [Action("B", m) for m in range(num_microbatches - num_warmup, num_microbatches)]


def forward_only(num_microbatches: int) -> list[Action]:
    """Forwards alone, for evaluation; every stage runs the same."""
    return [Action("F", m) for m in range(num_microbatches)]


def _check(stage: int, num_stages: int, num_microbatches: int) -> None:
    if not 0 <= stage < num_stages or num_microbatches < 1:
        raise UserError(f"no schedule for stage {stage} of {num_stages} with {num_microbatches} micro-batches")
