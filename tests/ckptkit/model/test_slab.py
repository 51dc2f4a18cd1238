"""Slabs cover every element once, in storage order; a box holds one range of each slab."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.model.slab import STEP_BYTES, positions_before, slab_batches
from ckptkit.model.tensor import Box, Placement, TensorInfo
from tests.ckptkit.support.model_tables import gpt_tensors


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    offset = tuple(draw(st.integers(0, size)) for size in shape)
    return shape, Box(offset, tuple(draw(st.integers(0, size - a)) for a, size in zip(offset, shape, strict=True)))


@given(boxes(), st.data())
def test_positions_before(case: tuple[tuple[int, ...], Box], data: st.DataObject) -> None:
    shape, box = case
    position = data.draw(st.integers(0, math.prod(shape)))
    inside = np.zeros(shape, bool)
    inside[tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))] = True
    assert positions_before(box, shape, position) == inside.reshape(-1)[:position].sum()


@given(
    st.lists(st.tuples(st.integers(0, 3_000_000), st.sampled_from(["F32", "F64", "U8"])), max_size=6), st.integers(1, 5)
)
def test_batches_are_bounded_and_complete(sizes: list[tuple[int, str]], steps: int) -> None:
    tensors = [TensorInfo(f"t{i}", dtype, (n,), Placement(0)) for i, (n, dtype) in enumerate(sizes)]
    done = {info.name: 0 for info in tensors}
    for batch in slab_batches(tensors, steps * STEP_BYTES):
        assert batch
        assert sum(slab.size_bytes for slab in batch) <= steps * STEP_BYTES
        for slab in batch:
            assert slab.start == done[slab.info.name] < slab.stop
            assert slab.start * slab.size_bytes // (slab.stop - slab.start) % STEP_BYTES == 0, "whole blocks"
            done[slab.info.name] = slab.stop
    assert done == {info.name: info.numel for info in tensors}


def test_tied_tensors_have_no_slabs() -> None:
    names = {slab.info.name for batch in slab_batches(gpt_tensors(tied=True)) for slab in batch}
    assert "head.weight" not in names
    assert "embed.weight" in names
