"""Mixture: counts, places and skips of a stream whose segments change, against the plainest model of the same."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from datakit.order.mixture import Mixture, Segment
from datakit.order.weighted_sequence import CIRCLE, WeightedSequence, denominators, max_deviation
from threefold.errors import UserError

NUM_SOURCES, END = 3, 400
WEIGHTS = st.lists(st.sampled_from([0.0, 0.01, 1.0, 2.5]), min_size=NUM_SOURCES, max_size=NUM_SOURCES).filter(any)


@st.composite
def segment_lists(draw: st.DrawFn) -> list[Segment]:
    """The first weights, and up to four changes of weights, skips or both."""
    starts = sorted(draw(st.lists(st.integers(1, 250), max_size=4, unique=True)))
    segments = [Segment(0, tuple(draw(WEIGHTS)))]
    for start in starts:
        edges = sorted(draw(st.lists(st.integers(start, start + 150), max_size=6, unique=True)))
        skip = tuple(zip(edges[::2], edges[1::2]))
        weights = tuple(draw(WEIGHTS)) if draw(st.booleans()) else None
        segments.append(Segment(start, weights, skip))
    return segments


def model(segments: list[Segment], seed: int) -> list[tuple[int, int]]:
    """The stream's first samples, source and number each: a list that each segment writes on from its first sample."""
    stream: list[list[int]] = []  # source, number, and whether it is read
    num_sequences = 0
    for segment in segments:
        read = [place for place, (_, _, is_read) in enumerate(stream) if is_read]
        if segment.weights is not None:
            del stream[read[segment.from_sample - 1] + 1 if segment.from_sample else 0 :]
            theta = xxhash.xxh3_64_intdigest(f"{seed}/segment/{num_sequences}".encode()) % CIRCLE
            sources, numbers = WeightedSequence(segment.weights, theta).locate(np.arange(3 * END))
            base = [sum(source == each for each, _, _ in stream) for source in range(NUM_SOURCES)]
            stream += [[source, base[source] + number, True] for source, number in zip(sources.tolist(), numbers)]
            num_sequences += 1
            read = [place for place, (_, _, is_read) in enumerate(stream) if is_read]
        for first, stop in segment.skip:
            for place in read[first:stop]:
                stream[place][2] = False
    return [(source, int(number)) for source, number, is_read in stream if is_read][:END]


@settings(max_examples=8)
@given(segments=segment_lists(), seed=st.integers(0, 2**40))
def test_a_mixture_is_what_its_segments_say(segments: list[Segment], seed: int) -> None:
    assert_as_modelled(segments, seed)


@pytest.mark.slow
@settings(max_examples=200)
@given(segments=segment_lists(), seed=st.integers(0, 2**40))
def test_any_mixture_is_what_its_segments_say(segments: list[Segment], seed: int) -> None:
    assert_as_modelled(segments, seed)


def assert_as_modelled(segments: list[Segment], seed: int) -> None:
    expected, mixture = model(segments, seed), Mixture(segments, seed)
    sources, numbers = mixture.locate(np.arange(END))
    assert list(zip(sources.tolist(), numbers.tolist())) == expected
    for n in (0, 1, 100, 251, END):
        counts = np.bincount(sources[:n], minlength=NUM_SOURCES)
        assert mixture.counts(n).tolist() == counts.tolist()
        assert (mixture.positions(n) >= counts).all()
    for source in range(NUM_SOURCES):
        places = {number: sample for sample, (each, number) in enumerate(expected) if each == source}
        for number in range(int(mixture.positions(END)[source])):
            found = mixture.sample_of(source, number)
            assert found == places.get(number) or (number not in places and found is not None and found >= END)


@pytest.mark.slow
@settings(max_examples=150)
@given(segments=segment_lists(), later=segment_lists(), seed=st.integers(0, 99), at=st.integers(1, 300))
def test_what_is_appended_leaves_the_past_alone(
    segments: list[Segment], later: list[Segment], seed: int, at: int
) -> None:
    start = max(at, segments[-1].from_sample + 1)
    moved = [
        replace(each, from_sample=start + each.from_sample, skip=tuple((start + a, start + b) for a, b in each.skip))
        for each in later
    ]
    before, after = Mixture(segments, seed), Mixture([*segments, *moved], seed)
    past = np.arange(start)
    assert all((old == new).all() for old, new in zip(before.locate(past), after.locate(past)))
    assert (before.counts(start) == after.counts(start)).all()


@pytest.mark.slow
@settings(max_examples=60)
@given(
    segments=segment_lists(),
    lengths=st.lists(st.integers(0, 60), min_size=3, max_size=3),
    far=st.integers(0, 2**61),
)
def test_every_prefix_keeps_to_the_weights(segments: list[Segment], lengths: list[int], far: int) -> None:
    mixture = Mixture(segments)
    for n in (*range(END), *(2**length - 1 for length in lengths), far):
        wanted = [Fraction(0)] * NUM_SOURCES
        for run, end in zip(mixture.runs, [*[each.begin for each in mixture.runs[1:]], n]):
            length = max(min(end, n) - run.begin, 0)
            wanted = [sofar + Fraction(arc * length, CIRCLE) for sofar, arc in zip(wanted, run.sequence.arcs)]
        off = max(abs(count - share) for count, share in zip(mixture.counts(n).tolist(), wanted))
        assert off <= mixture.max_deviation(n)


def test_the_bound_is_the_sum_of_few_denominators() -> None:
    assert denominators()[:8] == (1, 1, 2, 3, 5, 8, 13, 21)
    assert denominators()[-1] == CIRCLE
    assert [max_deviation(n) for n in (0, 1, 21, 1000, 10**6)] == [0, 2, 2, 4, 10]
    rng = np.random.default_rng(0)
    for n in rng.integers(1, 2**31, 2000).tolist():
        assert max_deviation(n) < 1.5 * math.log2(n) + 3


def test_a_thousand_sources_are_exact_far_out() -> None:
    weights = np.random.default_rng(1).random(1000)
    mixture = Mixture([Segment(0, tuple(weights)), Segment(10**12, tuple(weights[::-1]), ((10**12 + 5, 10**12 + 9),))])
    samples = np.r_[10**12 - 50 : 10**12 + 50, 2**61 - 50 : 2**61]
    sources, numbers = mixture.locate(samples)
    for sample, source, number in zip(samples.tolist(), sources.tolist(), numbers.tolist()):
        assert mixture.sample_of(source, number) == sample
    for run in (samples[:50], samples[54:100], samples[100:]):
        steps = mixture.counts(int(run[-1]) + 1) - mixture.counts(int(run[0]))
        assert (steps == np.bincount(mixture.locate(run)[0], minlength=1000)).all()


@pytest.mark.parametrize(
    ("later", "fault"),
    [
        ([Segment(5), Segment(5)], "from sample 5 on come after 5"),
        ([Segment(5), Segment(4)], "from sample 4 on come after 5"),
        ([Segment(0)], "from sample 0 on come after 0"),
        ([Segment(5, (1.0,))], "1 weights for 2 stores"),
        ([Segment(5, (0.0, 0.0))], "one must be positive"),
        ([Segment(5, (-1.0, 2.0))], "none may be negative"),
        ([Segment(5, None, ((4, 8),))], "cannot skip samples 4 to 8"),
        ([Segment(5, None, ((8, 8),))], "cannot skip samples 8 to 8"),
        ([Segment(5, None, ((8, 10), (9, 12)))], "cannot skip samples 9 to 12"),
        ([Segment(5, None, ((8, 2**62),))], "cannot skip"),
    ],
)
def test_faulty_segments(later: list[Segment], fault: str) -> None:
    with pytest.raises(UserError, match=fault) as caught:
        Mixture([Segment(0, (1.0, 1.0)), *later])
    assert caught.value.hint


def test_what_is_skipped_is_no_longer_to_be_counted_at_the_end() -> None:
    mixture = Mixture([Segment(0, (1.0, 1.0)), Segment(5, None, ((8, 2**61),))])
    assert mixture.max_samples == 2**62 - 2**61 + 8
    assert mixture.counts(mixture.max_samples).sum() == mixture.max_samples
    with pytest.raises(UserError, match="can be counted"):
        mixture.counts(mixture.max_samples + 1)
    assert [mixture.reads_from(0, n) for n in (3, 9)] == [3, 9]
