"""Passes: pure functions from a schedule to a wider one.

`with_transfers` makes explicit what follows from the order of forward and backward passes; a W reads and makes nothing
that travels. A send comes right after the pass that made the tensor; a receive comes right before the one that reads
it, or is posted some passes ahead. Between two ranks the tensors of one direction have one order on both ends.

Posting ahead is not for GPUs yet: two of them never finished a step of 1F1B with tensors of 32 MiB. NCCL waits for
a tensor in a kernel; if anything waits for all kernels, two ranks that posted ahead wait for each other.
`simulate(..., blocking=True)` finds such rows.
"""

from collections.abc import Sequence

from trainer.pipeline.actions import Action, Schedule, stage_ranks


def with_transfers(schedule: Schedule, ahead: int = 0) -> list[list[Action]]:
    """Return a schedule with sends and receives; each receive is posted `ahead` passes before its tensor is read.

    Stages on one rank need none. With ahead 1, rank 1 of 2 has RF0 RF1 F0 B0 SB0 F1 B1 SB1 of F0 B0 F1 B1.
    """
    ranks = stage_ranks(schedule)
    return [_row_with_transfers(rank, row, ranks, ahead) for rank, row in enumerate(schedule)]


def _row_with_transfers(rank: int, row: Sequence[Action], ranks: dict[int, int], ahead: int) -> list[Action]:
    widened: list[Action] = []
    num_posted = 0
    for number, action in enumerate(row):
        for later in row[num_posted : number + ahead + 1]:
            before = {"F": later.stage - 1, "B": later.stage + 1}.get(later.kind, later.stage)
            if ranks.get(before, rank) != rank:
                widened.append(Action("RF" if later.kind == "F" else "RB", later.stage, later.microbatch))
        num_posted = number + ahead + 1
        widened.append(action)
        after = {"F": action.stage + 1, "B": action.stage - 1}.get(action.kind, action.stage)
        if ranks.get(after, rank) != rank:
            widened.append(Action("SF" if action.kind == "F" else "SB", action.stage, action.microbatch))
    return widened
