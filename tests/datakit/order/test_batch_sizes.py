"""BatchSizes: the sizes of Megatron-LM's rule, and steps counted as a walk over them does."""

import re
from collections.abc import Iterator
from itertools import pairwise

import pytest

from datakit import BatchSizes
from datakit.config.steps import Steps
from datakit.order.batch_sizes import equal_steps
from threefold.errors import UserError

RAMPS = [  # START, INCR, SAMPLES and the last size: among them edges in the middle of steps, and quotients that round
    (start, increment, samples, start + number * increment)
    for start, increment in ((1, 1), (8, 4), (6, 9))
    for number in (1, 3, 7)
    for samples in (1, 10, 49, 300)
]


class Calculator:
    """Megatron-LM's rule, which walks over the steps."""

    def __init__(self, start: int, increment: int, samples: int, final: int) -> None:
        num_increments, rest = divmod(final - start, increment)
        assert not rest
        self.start, self.increment, self.samples, self.final = start, increment, samples, final
        self.samples_per_increment = samples / num_increments

    def size(self, consumed: int) -> int:
        if consumed > self.samples:
            return self.final
        return self.start + int(consumed / self.samples_per_increment) * self.increment

    def steps(self, consumed: int, num_steps: int) -> Iterator[tuple[int, int]]:
        """Yield where steps begin and end."""
        for _ in range(num_steps):
            after = consumed + self.size(consumed)
            yield consumed, after
            consumed = after


@pytest.mark.parametrize(("start", "increment", "samples", "final"), RAMPS)
def test_sizes_are_those_of_megatron(start: int, increment: int, samples: int, final: int) -> None:
    sizes, rule = BatchSizes(final, (start, increment, samples)), Calculator(start, increment, samples, final)
    assert list(map(sizes.at, range(samples + 3))) == list(map(rule.size, range(samples + 3)))
    for read in (0, start, 2 * start + 1):
        later = BatchSizes(final, sizes.rampup, read_before=read)
        for number, (begin, after) in enumerate(rule.steps(read, 40)):
            assert later.samples_after(0, number) == begin - read
            assert {later.steps_before(0, sample - read) for sample in range(begin, after)} == {number}
            assert (sizes.samples_after(read, number), sizes.steps_before(read, after - 1)) == (begin, number)


def test_steps_are_counted_and_not_walked() -> None:
    sizes = BatchSizes(4096, (32, 32, 10**12))
    parts = equal_steps(sizes, 0)
    assert [part.size for part in parts] == list(range(32, 4097, 32))
    for part, later in pairwise(parts):
        assert later.first == part.first + (later.step - part.step) * part.size
    number = sizes.steps_before(0, 10**13)
    assert sizes.samples_after(0, number) <= 10**13 < sizes.samples_after(0, number + 1)


def test_sizes_that_no_step_has_are_left_out() -> None:
    """8 samples pass two of the edges that are 3 samples apart."""
    assert [tuple(part) for part in equal_steps(BatchSizes(16, (8, 2, 12)), 0)] == [(0, 0, 8), (8, 1, 12), (20, 2, 16)]


@pytest.mark.parametrize(
    ("final", "rampup", "text"),
    [
        (16, (8, 4, 0), "three numbers from 1 on"),
        (16, (8, 4), "three numbers from 1 on, got 8 4"),
        (16, (16, 4, 10), "START 16 has to be below the last size, 16"),
        (16, (8, 3, 10), "INCR 3 lead from START 8 past 16: 1, 2, 4, 8 do not"),
    ],
)
def test_what_does_not_grow_is_refused(final: int, rampup: tuple[int, ...], text: str) -> None:
    with pytest.raises(UserError, match=re.escape(text)):
        BatchSizes(final, rampup)


def test_a_run_of_one_ramp_knows_its_steps_from_the_first_on() -> None:
    sizes = BatchSizes(16, (8, 4, 100))
    samples = sizes.samples_after(0, 9)
    known = Steps(sizes, 9, samples)
    assert known.first_known == 0
    assert [known.step_of(sample) for sample in (0, 55, 56, 103, 104)] == [1, 7, 8, 11, 12]
    other = Steps(BatchSizes(16), 9, samples)
    assert (other.first_known, other.step_of(samples - 1), other.samples(10)) == (9, None, range(samples, samples + 16))
    with pytest.raises(UserError, match="steps up to 9 had another batch size"):
        other.samples(9)
