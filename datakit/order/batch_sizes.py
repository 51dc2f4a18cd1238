"""BatchSizes: how many samples a step has, where the batch of a run grows; the rule is that of Megatron-LM.

With `rampup` (8, 4, 100) and 16 samples at last, a step has 8 samples if fewer than 50 were read before it, 12 if fewer
than 100 were, else 16. So the sizes are a function of samples: a run that goes on at a sample has the sizes that it
would have had. Steps of one size follow each other. Whatever is asked of a step is worked out of the first of them,
without a walk over those between. Cost: a binary search for each size, once for each sample at which steps begin.
Source: `RampupBatchsizeNumMicroBatchesCalculator` of megatron-core, whose division is one of floats too.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

from threefold.errors import UserError


class EqualSteps(NamedTuple):
    """Steps of one size that follow each other: the first one's sample and number, and the size."""

    first: int
    step: int
    size: int


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Steps of `final` samples, before which the batch grows if `rampup` has Megatron-LM's START, INCR and SAMPLES.

    `read_before` are samples that another program read before the run began: they count.
    """

    final: int
    rampup: tuple[int, ...] = ()
    read_before: int = 0

    def __post_init__(self) -> None:
        """Raise UserError if the batch does not grow so."""
        if self.final < 1:
            raise UserError(f"steps have at least 1 sample, got {self.final}", hint="BatchSizes(16)")
        if (fault := rampup_fault(self.final, self.rampup)) is not None:
            raise UserError(f"the batch does not grow: {fault}", hint="BatchSizes(16, rampup=(8, 4, 100))")

    def __str__(self) -> str:
        return f"{self.rampup[0]:,} to {self.final:,}" if self.rampup else f"{self.final:,}"

    @property
    def sizes(self) -> range:
        """All sizes, in their order."""
        start, increment, _ = self.rampup or (self.final, 1, 0)
        return range(start, self.final + 1, increment)

    def at(self, sample: int) -> int:
        """Return the size of a step that begins at a sample of the run."""
        consumed = self.read_before + sample
        if not self.rampup or consumed > self.rampup[-1]:
            return self.final
        start, increment, samples = self.rampup
        return start + int(consumed / (samples / ((self.final - start) // increment))) * increment

    @property
    def first_of_final(self) -> int:
        """The number of the run's first step that has the last size, counted from 0."""
        return equal_steps(self, 0)[-1].step

    def samples_after(self, first: int, num_steps: int) -> int:
        """Return the sample at which the run is so many steps after one that begins at sample `first`."""
        parts = equal_steps(self, first)
        part = parts[max(bisect_right(parts, num_steps, key=attrgetter("step")) - 1, 0)]
        return part.first + (num_steps - part.step) * part.size

    def steps_before(self, first: int, sample: int) -> int:
        """Return how many steps, from one that begins at sample `first`, are over before that which reads a sample."""
        parts = equal_steps(self, first)
        part = parts[max(bisect_right(parts, sample, key=attrgetter("first")) - 1, 0)]
        return part.step + (sample - part.first) // part.size


@lru_cache(maxsize=64)
def equal_steps(sizes: BatchSizes, first: int) -> tuple[EqualSteps, ...]:
    """Return the steps from one on that begins at sample `first`, by their size; a size that no step has is left out.

    With 8 samples from 0 on and 12 from 50 on, the step of sample 48 reads up to 55, and those of 12 begin at 56.
    """
    parts = [EqualSteps(first, 0, sizes.at(first))]
    while (last := parts[-1]).size < sizes.final:
        larger = range(last.first, sizes.rampup[-1] - sizes.read_before + 2)  # the last of them has the final size
        num_smaller = bisect_right(larger, last.size, key=sizes.at)
        num_steps = -(-num_smaller // last.size)
        sample = last.first + num_steps * last.size
        parts.append(EqualSteps(sample, last.step + num_steps, sizes.at(sample)))
    return tuple(parts)


def rampup_fault(final: int, rampup: tuple[int, ...]) -> str | None:
    """Return why a batch does not grow to `final` by START, INCR and SAMPLES; None if it does, or if none are said."""
    if not rampup:
        return None
    if len(rampup) != 3 or min(rampup) < 1:
        return f"START INCR SAMPLES are three numbers from 1 on, got {' '.join(map(str, rampup)) or 'none'}"
    start, increment, _ = rampup
    if start >= final:
        return f"START {start} has to be below the last size, {final}: without a ramp all steps have {final} samples"
    if (final - start) % increment:
        divisors = [size for size in range(1, final - start + 1) if (final - start) % size == 0]
        near = sorted(sorted(divisors, key=lambda size: abs(size - increment))[:6])
        return f"steps of INCR {increment} lead from START {start} past {final}: {', '.join(map(str, near))} do not"
    return None
