"""ZB-H1 (Qi and others 2023, arXiv 2401.10241): 1F1B whose backward passes leave the gradients of weights for later.

The rank before waits for B alone. W fills what would be bubble at the end: rank r puts it off by r backward passes. So
every rank keeps as much as rank 0 of 1F1B: p micro-batches that wait for their B or their W. If F, B and W take as long
the bubble is a third of 1F1B's. Each stage's W come in order of micro-batches, one at a time, so sums of gradients
have the bits of the other schedules.
"""

from trainer.pipeline.actions import Action, check_sizes
from trainer.pipeline.one_f_one_b import num_warmup
from trainer.pipeline.order import backward_passes, forward_passes, in_turn


def zb_h1(num_ranks: int, num_microbatches: int, virtual: int = 1) -> list[list[Action]]:
    """Return the rows of all ranks, each with `virtual` stages.

    On rank r at most `num_warmup + 1 + r` passes are live, which is `num_ranks` with one stage each. Rank 1 of 2 with
    3 micro-batches runs F0 B0 F1 B1 W0 F2 B2 W1 W2.
    """
    sizes = num_ranks, num_microbatches, virtual
    check_sizes(*sizes)
    return [
        in_turn(forward_passes(rank, *sizes), backward_passes(rank, *sizes), num_warmup(rank, *sizes), lag=rank)
        for rank in range(num_ranks)
    ]
