"""Mesh cut: what the placements of a DTensor leave to each rank, cut as torch.chunk cuts, each element once."""

import itertools

import pytest
import torch

from ckptkit.model.mesh_cut import mesh_cut


@pytest.mark.parametrize("size", [0, 1, 2, 5, 7, 10, 17, 64])
@pytest.mark.parametrize(("outer", "inner"), [(2, 2), (2, 3), (3, 2), (4, 8)])
def test_a_strided_shard_is_the_rows_of_one_cut_after_the_other(size: int, outer: int, inner: int) -> None:
    """FSDP2 over `outer` ranks cuts what tensor parallelism over `inner` left."""
    rows = torch.arange(size)
    boxes = []
    for i, j in itertools.product(range(outer), range(inner)):
        chunks = rows.chunk(inner) if size else ()
        left = chunks[j] if j < len(chunks) else rows[:0]
        chunks = left.chunk(outer) if len(left) else ()
        expected = (chunks[i] if i < len(chunks) else rows[:0]).tolist()
        parts, shape = mesh_cut((size, 3), ((0, inner, outer, i), (0, 1, inner, j)))
        got = [row for part in parts for row in range(part.box.offset[0], part.box.offset[0] + part.box.shape[0])]
        assert (got, shape) == (expected, (len(expected), 3))
        boxes += got
    assert sorted(boxes) == list(range(size))
