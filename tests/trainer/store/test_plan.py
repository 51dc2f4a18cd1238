"""Buckets on paper: runs without gaps, one unit and one group of holders each, intervals that own each element once."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.mesh.layout import OVER_DATA, Axis
from trainer.store.plan import BucketPlan, ParameterRun, plan_buckets, plan_runs

SHAPES = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=6)


def runs_of(shapes: list[tuple[int, ...]]) -> list[ParameterRun]:
    return [ParameterRun({f"p{number}": shape}, "unit", OVER_DATA) for number, shape in enumerate(shapes)]


@given(shapes=SHAPES, itemsize=st.sampled_from([2, 4, 8]), num_holders=st.integers(1, 5))
def test_intervals_own_each_element_once(shapes: list[tuple[int, ...]], itemsize: int, num_holders: int) -> None:
    plan = BucketPlan(tuple(runs_of(shapes)), itemsize)
    offsets = {name: offset for name, _, offset in plan.parameters()}
    owned = {name: [0] * math.prod(shape) for name, shape, _ in plan.parameters()}
    for index in range(num_holders):
        start, stop = plan.interval(num_holders, index)
        assert (stop - start) * num_holders == plan.size(num_holders)
        for segment in plan.segments(start, stop):
            assert start + segment.offset == offsets[segment.name] + segment.start, "where its parameter is"
            for position in range(segment.start, segment.stop):
                owned[segment.name][position] += 1
    assert all(set(counts) == {1} for counts in owned.values())


@given(shapes=SHAPES, itemsize=st.sampled_from([2, 8]))
def test_runs_are_aligned_and_apart(shapes: list[tuple[int, ...]], itemsize: int) -> None:
    plan = BucketPlan(tuple(runs_of(shapes)), itemsize)
    assert all(offset * itemsize % 64 == 0 for offset in plan.offsets)
    ends = [offset + run.numel for run, offset in zip(plan.runs, plan.offsets, strict=True)]
    assert all(end <= offset for end, offset in zip(ends, plan.offsets[1:], strict=False))
    assert ends[-1] <= plan.size(1)


def test_gaps_are_what_no_run_has() -> None:
    plan = BucketPlan(tuple(runs_of([(16,), (3,), (30,)])), 4)
    assert (plan.offsets, plan.size(4), plan.gaps(4)) == ([0, 16, 32], 64, [(19, 32), (62, 64)])
    assert plan.gaps(1) == [(19, 32), (62, 64)]


def test_fused_parameters_are_one_matrix_without_gaps() -> None:
    shapes = {"norm": (3,), "q": (4, 3), "out": (3, 4), "k": (2, 3), "v": (2, 3)}
    names = dict.fromkeys(shapes, "layer")
    runs = plan_runs(shapes, [("q", "k", "v")], names, dict.fromkeys(shapes, OVER_DATA))
    assert [run.names for run in runs] == [("norm",), ("q", "k", "v"), ("out",)]
    assert runs[1].shape == (8, 3)
    (bucket,) = plan_buckets(runs, 1 << 20, 4)
    places = {name: offset for name, _, offset in bucket.parameters()}
    assert places["k"] - places["q"] == 12
    assert places["v"] - places["k"] == 6


@given(shapes=SHAPES, bytes_each=st.integers(1, 2000))
def test_runs_go_into_buckets_in_order(shapes: list[tuple[int, ...]], bytes_each: int) -> None:
    buckets = plan_buckets(runs_of(shapes), bytes_each, 4)
    assert [run.names[0] for bucket in buckets for run in bucket.runs] == [f"p{n}" for n in range(len(shapes))]
    sizes = [[run.numel * 4 for run in bucket.runs] for bucket in buckets]
    assert all(len(part) == 1 or sum(part) <= bytes_each for part in sizes)
    assert all(sum(part) + following[0] > bytes_each for part, following in pairwise(sizes))


@pytest.mark.parametrize("differs", ["unit", "holders"])
def test_no_bucket_spans_units_or_holders(differs: str) -> None:
    runs = [
        ParameterRun({"a": (3,)}, "layers.0", OVER_DATA),
        ParameterRun(
            {"b": (3,)},
            "layers.1" if differs == "unit" else "layers.0",
            OVER_DATA if differs == "unit" else (Axis.TP, *OVER_DATA),
        ),
        ParameterRun({"c": (3,)}, "layers.0", OVER_DATA),
    ]
    assert [bucket.runs for bucket in plan_buckets(runs, 1 << 20, 4)] == [(runs[0], runs[2]), (runs[1],)]
