"""Mixture: which source each sample of a stream comes from, while weights change and samples are skipped; arithmetic.

A stream is a list of runs of samples, each out of one weighted sequence. A segment with weights begins a new
sequence, in which each source goes on where it was. A skip goes on further along the same sequence: with samples 24 to
31 skipped, sample 24 is what sample 32 was, sample 25 what 33 was, and so on. Samples before a segment never change.

In every prefix a source has its weight's share of the samples, at most `max_deviation` off. For one segment that is
below 1.5 * log2(n) + 3 up to 2^31 samples, and 4 is rarely seen. There are no stores, ranks or batches here.
"""

import math
import reprlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import numpy as np
import xxhash

from datakit.format.shard import Int64s
from datakit.order.weighted_sequence import CIRCLE, WeightedSequence, max_deviation
from threefold.errors import UserError

MAX_SAMPLES = 1 << 62  # the stream is endless, its arithmetic is not


@dataclass(frozen=True, slots=True)
class Segment:
    """What changes from a sample on, in the numbers of the stream that the segments before make.

    `weights` are those of all sources, None leaves them. `skip` are ranges [first, stop) of samples that are never
    read, in the numbers that they have without it. `masked` are the documents (source, number) whose loss is masked,
    None leaves them. `from_step` is recorded if the change was asked for at a step. With `seq_length`, rows have so
    many tokens from there on, and a Blend reads each store from its beginning: to a Mixture these are new sources.
    """

    from_sample: int
    weights: tuple[float, ...] | None = None
    skip: tuple[tuple[int, int], ...] = ()
    masked: tuple[tuple[int, int], ...] | None = None
    from_step: int | None = None
    seq_length: int | None = None


Change = tuple[int, Sequence[float]]  # the sample from which on weights are in force, and they


@dataclass(frozen=True, slots=True)
class SampleRun:
    """Samples from `begin` on are those of a sequence from its sample `offset` on.

    `base` is how far each source was where the sequence began.
    """

    begin: int
    sequence: WeightedSequence
    offset: int
    base: Int64s

    def positions(self, num_samples: int) -> Int64s:
        """Return how far each source is after the stream's first samples, which end in this run."""
        return self.base + self.sequence.counts(self.offset + num_samples - self.begin)


class Mixture:
    """The stream of a list of segments, the first of which has weights and begins at sample 0."""

    def __init__(self, segments: Sequence[Segment], seed: int = 0) -> None:
        """Take segments in rising order; UserError if they are not, or skip what is read already."""
        self.segments = tuple(segments)
        self._check()
        runs: list[SampleRun] = []
        num_sequences = 0
        for segment in self.segments:
            if segment.weights is not None:
                runs = [run for run in runs if run.begin < segment.from_sample]
                base = runs[-1].positions(segment.from_sample) if runs else np.zeros(len(segment.weights), np.int64)
                theta = xxhash.xxh3_64_intdigest(f"{seed}/segment/{num_sequences}".encode()) % CIRCLE
                runs.append(SampleRun(segment.from_sample, WeightedSequence(segment.weights, theta), 0, base))
                num_sequences += 1
            for first, stop in sorted(segment.skip, reverse=True):  # from the last one: numbers before it stay
                runs = _without(runs, first, stop)
        self.runs = tuple(runs)
        self.max_samples = MAX_SAMPLES - max(0, *(run.offset - run.begin for run in runs))
        self._begins = [run.begin for run in runs]
        self._ends = [*self._begins[1:], self.max_samples]
        self._skips = any(run.offset for run in runs)
        self._starts = [run.positions(run.begin) for run in runs]
        self._read = [np.zeros_like(runs[0].base)]  # samples of each source before each run
        for run, start, end in zip(runs, self._starts, self._ends[:-1]):
            self._read.append(self._read[-1] + run.positions(end) - start)

    def counts(self, num_samples: int) -> Int64s:
        """Return how many of the stream's first samples come from each source."""
        number = self._run_of(num_samples)
        found = self.runs[number].positions(num_samples)
        return found - self._starts[number] + self._read[number] if self._skips else found

    def positions(self, num_samples: int) -> Int64s:
        """Return how far each source is after the stream's first samples: its samples that were read or skipped."""
        return self.runs[self._run_of(num_samples)].positions(num_samples)

    def locate(self, samples: Int64s) -> tuple[Int64s, Int64s]:
        """For each sample, below `max_samples`, its source and which of that source's samples it is; O(log) each."""
        if len(self.runs) == 1 and not self._skips:
            return self.runs[0].sequence.locate(samples)
        sources, numbers = np.empty_like(samples), np.empty_like(samples)
        runs = np.searchsorted(self._begins, samples, side="right") - 1
        for number in set(runs.tolist()):
            inside, run = runs == number, self.runs[number]
            found, earlier = run.sequence.locate(samples[inside] + (run.offset - run.begin))
            sources[inside], numbers[inside] = found, earlier + run.base[found]
        return sources, numbers

    def sample_of(self, source: int, number: int) -> int | None:
        """Return the sample that is a source's `number`-th, None if that is skipped: `locate` inverted.

        The source has so many samples within the stream.
        """
        at = bisect_right(self._starts, number, key=lambda start: int(start[source])) - 1
        run, end = self.runs[at], self._ends[at]
        if self._skips and number >= run.positions(end)[source]:
            return None
        inside = run.sequence.sample_of(source, number - int(run.base[source]))
        return inside - run.offset + run.begin

    def weights_at(self, sample: int) -> tuple[float, ...]:
        """Return the weights in force at a sample."""
        return [part.weights for part in self.segments if part.weights and part.from_sample <= sample][-1]

    def reads_from(self, source: int, num_samples: int) -> int | None:
        """Return the first sample, from `num_samples` on, at which a source may be read; None if it is read no more."""
        for run, end in zip(self.runs, self._ends):
            if end > num_samples and run.sequence.arcs[source]:
                return max(run.begin, num_samples)
        return None

    def first_samples(self) -> Int64s:
        """Return the sample from which on each source may be read, MAX_SAMPLES if it is never read."""
        found = np.full(len(self.runs[0].base), MAX_SAMPLES, np.int64)
        for run in reversed(self.runs):
            found[np.array(run.sequence.arcs) > 0] = run.begin
        return found

    def ranges(self, num_samples: int) -> list[tuple[Int64s, Int64s]]:
        """Return which of their samples the stream's first samples read of all sources, as ranges [starts, stops)."""
        number = self._run_of(num_samples)
        ends = [*self._ends[:number], num_samples]
        stops = [run.positions(end) for run, end in zip(self.runs, ends)]
        return list(zip(self._starts, stops))

    def max_deviation(self, num_samples: int) -> int:
        """Return by how many samples `counts` may differ from what the weights say, at most, for each source."""
        lengths = (min(end, num_samples) - begin for begin, end in zip(self._begins, self._ends))
        return sum(max_deviation(length) for length in lengths if length > 0)

    def _run_of(self, num_samples: int) -> int:
        """Return the number of the run that the sample after the first ones is in."""
        if not 0 <= num_samples <= self.max_samples:
            limit = shown_limit(self.max_samples)
            raise UserError(f"the stream has no first {num_samples} samples, from 0 to {limit} can be counted")
        return bisect_right(self._begins, num_samples) - 1

    def _check(self) -> None:
        num_sources = len(self.segments[0].weights or ())
        for previous, segment in zip((None, *self.segments), self.segments):
            check_weights(segment.weights, num_sources)
            last = start = segment.from_sample
            if previous is not None and not previous.from_sample < start < MAX_SAMPLES:
                raise UserError(
                    f"changes from sample {start} on come after {previous.from_sample}",
                    hint=f"from_sample = {previous.from_sample + 1} or more: each segment begins after the one before",
                )
            for first, stop in sorted(segment.skip):
                if not last <= first < stop < MAX_SAMPLES:
                    raise UserError(
                        f"the segment from sample {start} on cannot skip samples {first} to {stop}",
                        hint=f"skip = [[{last}, {max(stop, last + 1)}]]: ranges rise, and none is before its segment",
                    )
                last = stop


def shown_limit(num_samples: int) -> str:
    """Return a number of samples for a message."""
    return "2^62" if num_samples == MAX_SAMPLES else str(num_samples)


def check_weights(weights: tuple[float, ...] | None, num_sources: int) -> None:
    """Raise UserError if weights, None for none, are not one a source, from 0 on, with a finite sum above 0."""
    if weights is None:
        return
    if len(weights) != num_sources:
        raise UserError(f"{len(weights)} weights for {num_sources} stores", hint="one weight a store, 0 for none of it")
    if not min(weights) >= 0 or not 0 < sum(weights) < math.inf:
        raise UserError(
            f"weights {reprlib.repr(weights)}: none may be negative, one must be positive, their sum finite",
            hint="weights like 0.7 and 0.3; they need not sum to 1",
        )


def _without(runs: list[SampleRun], first: int, stop: int) -> list[SampleRun]:
    """Return runs of the stream that leaves samples [first, stop) out, so that sample `stop` becomes `first`."""
    after = [run for run in runs if run.begin <= stop]
    last = after[-1]
    before = [run for run in runs if run.begin < first]
    moved = [replace(run, begin=run.begin - (stop - first)) for run in runs if run.begin > stop]
    return [*before, replace(last, begin=first, offset=last.offset + stop - last.begin), *moved]


def segment_of(change: Segment | Change) -> Segment:
    """Return a change of weights as a segment; UserError unless it is a sample and numbers."""
    if isinstance(change, Segment):
        return change
    start, weights = change
    return Segment(_whole(start), tuple(map(weight_of, weights)))


def _whole(value: Any) -> int:
    if not isinstance(value, Integral):
        raise UserError(f"weights from sample {reprlib.repr(value)} on: not a whole number", hint="later=[(1000, ...)]")
    return int(value)


def weight_of(value: Any) -> float:
    """Return a weight as a float; UserError unless it is a number that a float holds."""
    try:
        if not isinstance(value, str | bytes):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise UserError(f"weight {reprlib.repr(value)} is not a number that a float holds", hint="weights like 0.7 and 0.3")
