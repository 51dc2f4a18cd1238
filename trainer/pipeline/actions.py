"""Action: what one pipeline rank does at one moment; a schedule is a row of actions for each rank.

F is the forward pass of a micro-batch through a stage and B its backward pass. A schedule may have W too: then B makes
the gradient of what the stage received and leaves the products for the gradients of weights to W. Passes add transfers:
SF sends what F returned to the next stage, RF begins to receive what F reads, SB and RB do the same for gradients and
the stage before. F(s, m) needs F(s - 1, m); B(s, m) needs F(s, m) and B(s + 1, m); W(s, m) needs B(s, m).
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "W", "SF", "RF", "SB", "RB"]
PASSES: tuple[Literal["F", "B", "W"], ...] = ("F", "B", "W")  # what computes; other kinds move tensors


class Action(NamedTuple):
    """One micro-batch on one stage; prints as `F3`."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}"


Schedule = Sequence[Sequence[Action]]  # by pipeline rank


def stage_ranks(schedule: Schedule) -> dict[int, int]:
    """Return the rank of each stage: the one whose row has its passes."""
    return {action.stage: rank for rank, row in enumerate(schedule) for action in row}


def most_sends(num_ranks: int, num_stages: int) -> int:
    """Return how many sends to a neighbour may be under way at once: 2, or 2 for each rank if they have several stages.

    More never made a step faster. With several stages a rank sends what a group of micro-batches made before its
    neighbour reads all of it, and fewer can be a deadlock: with 7 in a group on 4 ranks, fewer than 4.
    """
    return 2 if num_stages == num_ranks else 2 * num_ranks


def peak_live(row: Sequence[Action], before_b: int = 1, before_w: int = 1) -> int:
    """Return how much the passes of a row keep at once, at most: `before_b` from F to B and `before_w` from B to W.

    By default that is their number: of F0 F1 B0 F2 B1 B2 it is 2, and of F0 B0 F1 B1 W0 W1 too.
    """
    puts_off = {(stage, m) for kind, stage, m in row if kind == "W"}
    kept = peak = 0
    for kind, stage, m in row:
        if kind == "F":
            kept += before_b
        elif kind == "B":
            kept -= before_b - before_w * ((stage, m) in puts_off)
        elif kind == "W":
            kept -= before_w
        peak = max(peak, kept)
    return peak


def peak_received(row: Sequence[Action]) -> int:
    """Return how many tensors a row has asked for at most that no pass reads yet: of RF0 RF1 F0 RF2 F1 it is 2."""
    asked: set[tuple[str, int, int]] = set()
    peak = 0
    for kind, stage, m in row:
        if kind in ("RF", "RB"):
            asked.add((kind[1], stage, m))
            peak = max(peak, len(asked))
        asked.discard((kind, stage, m))
    return peak
