"""1F1B (Narayanan and others 2021): warm up, alternate, drain; interleaved if a rank holds several stages.

Its bubble is (p - 1) / (m + p - 1) of the step for p ranks and m micro-batches, as GPipe's. With v stages a rank a pass
is that much shorter, and so is what a rank waits for at either end: (p - 1) / (v m + p - 1), if m is at least p.
"""

from trainer.pipeline.actions import Action, check_sizes
from trainer.pipeline.order import backward_passes, forward_passes, groups, in_turn


def one_f_one_b(num_ranks: int, num_microbatches: int, virtual: int = 1) -> list[list[Action]]:
    """Return the rows of all ranks, each with `virtual` stages; at most `num_warmup + 1` passes are live.

    Rank 1 of 4 with 4 micro-batches runs F0 F1 F2 B0 F3 B1 B2 B3.
    """
    sizes = num_ranks, num_microbatches, virtual
    check_sizes(*sizes)
    return [
        in_turn(forward_passes(rank, *sizes), backward_passes(rank, *sizes), num_warmup(rank, *sizes))
        for rank in range(num_ranks)
    ]


def num_warmup(rank: int, num_ranks: int, num_microbatches: int, virtual: int) -> int:
    """Return how many forward passes come before the rank's first pair of a forward and a backward pass.

    With one stage a rank they fill the ranks after it. With more, those of the first group in all stages but the last
    come first, and what follows travels there and back: rank 0 of 4 with 2 stages each and 8 micro-batches has 4 + 6.
    """
    to_last = num_ranks - rank - 1
    largest = len(groups(num_ranks, num_microbatches)[0])
    wanted = to_last if virtual == 1 else (virtual - 1) * largest + 2 * to_last
    return min(wanted, num_microbatches * virtual)
