"""Buckets: aligned views of one buffer, and intervals that own every element of every parameter once."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trainer.bucket import Bucket, attach, cut_into_buckets, squared_norm
from trainer.mesh.clock import Clock
from trainer.mesh.group import Group

CPU = torch.device("cpu")
SHAPES = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=6)


def named(shapes: list[list[int]]) -> dict[str, torch.Size]:
    return {f"p{number}": torch.Size(shape) for number, shape in enumerate(shapes)}


def buckets_of(shapes: list[list[int]], dtype: torch.dtype, dp_size: int) -> list[Bucket]:
    """The bucket as each data-parallel rank has it, without processes."""
    groups = [Group("dp", tuple(range(dp_size)), index, Clock(CPU)) for index in range(dp_size)]
    return [Bucket(named(shapes), dtype, CPU, group, cut=True, trains=True) for group in groups]


@given(shapes=SHAPES, dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]), dp_size=st.integers(1, 5))
def test_intervals_own_each_element_once(shapes: list[list[int]], dtype: torch.dtype, dp_size: int) -> None:
    buckets = buckets_of(shapes, dtype, dp_size)
    owned = {name: torch.zeros(shape.numel(), dtype=torch.int64) for name, shape in named(shapes).items()}
    for bucket in buckets:
        values = dict(bucket.views(torch.arange(len(bucket.parameters))))
        interval = torch.arange(len(bucket.parameters))[bucket.interval]
        for segment in bucket.segments:
            owned[segment.name][segment.start : segment.stop] += 1
            expected = values[segment.name].flatten()[segment.start : segment.stop]
            assert torch.equal(segment.of(interval), expected), "a segment lies where its parameter does"
    assert all(bool((count == 1).all()) for count in owned.values())
    assert len({len(bucket.master) for bucket in buckets}) == 1


@given(shapes=SHAPES, dtype=st.sampled_from([torch.float64, torch.bfloat16]))
def test_parameters_are_aligned_and_apart(shapes: list[list[int]], dtype: torch.dtype) -> None:
    (bucket,) = buckets_of(shapes, dtype, 1)
    for number, (_, view) in enumerate(bucket.views(bucket.parameters), 1):
        assert view.storage_offset() * dtype.itemsize % 64 == 0
        view += number
    for number, (name, view) in enumerate(bucket.views(bucket.parameters), 1):
        assert view.shape == bucket.shapes[name]
        assert bool((view == number).all())


def test_optimizer_state_is_cut_and_the_master_of_wide_parameters_is_no_copy() -> None:
    shapes = [[992], [32]]  # no padding at 64 bytes
    whole = 1024 * 4
    assert [bucket.state_bytes for bucket in buckets_of(shapes, torch.float32, 4)] == [2 * whole // 4] * 4
    assert [bucket.state_bytes for bucket in buckets_of(shapes, torch.bfloat16, 2)] == [3 * whole // 2] * 2
    (bucket,) = buckets_of(shapes, torch.float32, 1)
    assert bucket.master.data_ptr() == bucket.parameters.data_ptr()


@given(shapes=SHAPES, bytes_each=st.integers(1, 2000))
def test_parameters_go_into_buckets_in_order(shapes: list[list[int]], bytes_each: int) -> None:
    parts = cut_into_buckets(named(shapes), bytes_each, 4)
    assert {name: shape for part in parts for name, shape in part.items()} == named(shapes)
    assert [name for part in parts for name in part] == list(named(shapes))
    sizes = [[shape.numel() * 4 for shape in part.values()] for part in parts]
    assert all(len(part) == 1 or sum(part) <= bytes_each for part in sizes)
    assert all(sum(part) + following[0] > bytes_each for part, following in pairwise(sizes))


def test_backward_adds_to_the_wide_gradients() -> None:
    layer = nn.Linear(3, 1, bias=False, dtype=torch.bfloat16)
    (bucket,) = buckets_of([[1, 3]], torch.bfloat16, 1)
    ((_, values),), ((_, gradients),) = bucket.views(bucket.parameters), bucket.views(bucket.gradients)
    attach(layer, "weight", values, gradients)
    for value in (256.0, 1.0):  # their sum is no bfloat16
        layer(torch.full((1, 3), value, dtype=torch.bfloat16)).sum().backward()
    assert gradients.tolist() == [[257.0, 257.0, 257.0]]
    assert layer.weight.grad is None
    assert squared_norm([bucket], lambda _: True).item() == 3 * 257.0**2
    assert squared_norm([bucket], lambda segment: segment.name != "p0").item() == 0
