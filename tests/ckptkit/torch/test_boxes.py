"""Boxes: what the placements of a DTensor leave to each rank, cut as torch.chunk cuts, each element once."""

import itertools

import numpy as np
import pytest
import torch

from ckptkit.model.box import Box
from ckptkit.torch.boxes import _cut
from ckptkit.torch.shares import Row, shares_of, table_of


@pytest.mark.parametrize("size", [0, 1, 2, 5, 7, 10, 17, 64])
@pytest.mark.parametrize(("outer", "inner"), [(2, 2), (2, 3), (3, 2), (4, 8)])
def test_a_strided_shard_is_the_rows_of_one_cut_after_the_other(size: int, outer: int, inner: int) -> None:
    """FSDP2 over `outer` ranks cuts what tensor parallelism over `inner` left."""
    rows = torch.arange(size)
    found = []
    for i, j in itertools.product(range(outer), range(inner)):
        chunks = rows.chunk(inner) if size else ()
        left = chunks[j] if j < len(chunks) else rows[:0]
        chunks = left.chunk(outer) if len(left) else ()
        expected = (chunks[i] if i < len(chunks) else rows[:0]).tolist()
        parts, shape = _cut((size, 3), ((0, inner, outer, i), (0, 1, inner, j)))
        got = [row for part in parts for row in range(part.box.offset[0], part.box.offset[0] + part.box.shape[0])]
        assert (got, shape) == (expected, (len(expected), 3))
        found += got
    assert sorted(found) == list(range(size))


def test_replicas_are_written_once_in_equal_parts() -> None:
    whole, half = Box((0,), (1000,)), Box((0,), (500,))
    rows = [
        [Row("a", "F32", (1000,), (whole,), True, ""),
         Row("b", "F64", (1000,), (Box((500 * (r % 2),), (500,)),), True, ""),
         Row("c", "U8", (1000,), (whole,), False, ""), Row("d", "F32", (1000,), (whole,), True, "a")]
        for r in range(4)
    ]  # fmt: skip
    table = table_of(rows)
    assert {info.name: info.placement.tied_to for info in table} == {"a": None, "b": None, "c": None, "d": "a"}
    written = {name: np.zeros(1000, int) for name in "abc"}
    for rank in range(4):
        shares = shares_of(rank, rows, table)
        assert {share.name for share in shares} == ({"a", "b", "c"} if rank == 0 else {"a", "b"})
        for share in shares:
            first = 0 if share.name != "b" else half.shape[0] * (rank % 2)
            written[share.name][first + share.start : first + share.stop] += 1
    assert all((count == 1).all() for count in written.values())
