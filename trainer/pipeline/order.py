"""The order of passes on a rank that holds one stage or several, which all ranks agree on.

Stages are dealt in turn: of 2 ranks with 2 stages each, rank 0 holds stages 0 and 2. Micro-batches take turns in groups
of at least as many as there are ranks, so that the turn of a rank's next stage comes when the group's first is through
all ranks (Narayanan and others 2021, whose groups are of exactly so many, which must divide the micro-batches).
"""

from collections.abc import Sequence
from itertools import pairwise

from trainer.pipeline.actions import Action


def groups(num_ranks: int, num_microbatches: int) -> list[range]:
    """Return the micro-batches that take turns: as many groups as can be, whose sizes differ by one at most.

    11 micro-batches on 4 ranks are 0-5 and 6-10. Fewer micro-batches than ranks are one group.
    """
    num_groups = max(num_microbatches // num_ranks, 1)
    bounds = [-(-number * num_microbatches // num_groups) for number in range(num_groups + 1)]
    return [range(start, stop) for start, stop in pairwise(bounds)]


def forward_passes(rank: int, num_ranks: int, num_microbatches: int, virtual: int) -> list[Action]:
    """Return a rank's forward passes.

    Rank 0 of 2 with stages 0 and 2 and 4 micro-batches: F0 F1 of stage 0, F0 F1 of stage 2, then F2 F3 of each.
    """
    return [
        Action("F", rank + turn * num_ranks, m)
        for group in groups(num_ranks, num_microbatches)
        for turn in range(virtual)
        for m in group
    ]


def backward_passes(rank: int, num_ranks: int, num_microbatches: int, virtual: int) -> list[Action]:
    """Return a rank's backward passes: in the same groups, its last stage first."""
    ends = 2 * rank + (virtual - 1) * num_ranks  # the sum of its first and its last stage
    passes = forward_passes(rank, num_ranks, num_microbatches, virtual)
    return [Action("B", ends - stage, m) for _, stage, m in passes]


def in_turn(
    forward: Sequence[Action], backward: Sequence[Action], num_warmup: int, lag: int | None = None
) -> list[Action]:
    """Return `num_warmup` forward passes, then a forward and a backward pass in turn, then what is left.

    With a lag each backward pass has a W, which comes so many backward passes later.
    """
    row = list(forward[:num_warmup])
    for place, action in enumerate(backward):
        row += [*forward[num_warmup + place :][:1], action]
        if lag is not None and place >= lag:
            row.append(backward[place - lag]._replace(kind="W"))
    return row + [action._replace(kind="W") for action in (backward[-lag:] if lag else ())]
