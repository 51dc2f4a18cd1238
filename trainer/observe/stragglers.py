"""Stragglers: ranks whose own work takes longer than that of the others, step after step.

A step ends everywhere at once, as ranks wait for each other; what differs is a step's time without those waits. A
rank is compared with the median of the others, and named beyond a share: stages of a pipeline differ by what they hold.
"""

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, median


class Stragglers:
    """Own times of this rank's steps, and which ranks were slow so far; owned by the training thread."""

    def __init__(self, share: float, num_steps: int) -> None:
        self._share, self.num_steps = share, num_steps
        self._own_s: list[float] = []
        self._slow: dict[int, list[float]] = defaultdict(list)
        self._num_compared, self._has_begun = 0, False

    def add(self, own_s: float) -> bool:
        """Add a step; return whether so many are there that ranks are compared.

        The first of a start is left out: ranks load and time what others wait for.
        """
        if self._share and self._has_begun:
            self._own_s.append(own_s)
        self._has_begun = True
        return len(self._own_s) >= self.num_steps

    def take(self) -> float:
        """Return the median of what was added, and begin again: a single step that waits for a disk is left out."""
        own_s, self._own_s = median(self._own_s), []
        return own_s

    def compare(self, own_s: Sequence[float]) -> dict[int, float]:
        """Return the ranks that are slow, each with how much longer it takes than the median of the others."""
        slow = slower(own_s, self._share)
        self._num_compared += 1
        for rank, share in slow.items():
            self._slow[rank].append(share)
        return slow

    @property
    def summary(self) -> str:
        """Return who was slow in at least half of the comparisons, empty if nobody was."""
        often = {rank: shares for rank, shares in self._slow.items() if 2 * len(shares) >= self._num_compared}
        return "; ".join(
            f"rank {rank} was slower than the others by {fmean(shares):.0%}, in {len(shares)} of {self._num_compared} "
            f"comparisons of {self.num_steps} steps"
            for rank, shares in sorted(often.items())
        )


def slower(own_s: Sequence[float], share: float) -> dict[int, float]:
    """Return ranks whose time is above the median of the others by more than a share, with how much.

    Of 1.0, 1.0, 1.3, 1.1 s the third rank has others of 1.0, 1.0 and 1.1 s, so it is slower by 30%.
    """
    others = [median([*own_s[:rank], *own_s[rank + 1 :]] or own_s) for rank in range(len(own_s))]
    ratios = {rank: own / other - 1 for rank, (own, other) in enumerate(zip(own_s, others, strict=True)) if other > 0}
    return {rank: ratio for rank, ratio in ratios.items() if ratio > share}
