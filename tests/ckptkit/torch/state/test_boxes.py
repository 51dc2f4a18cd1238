"""Shares: what several ranks hold is written once, an equal part by each."""

import numpy as np

from ckptkit.model.tensor import Box
from ckptkit.torch.state.saving import RankTensor, shares_of, table_of


def test_replicas_are_written_once_in_equal_parts() -> None:
    whole, half = Box((0,), (1000,)), Box((0,), (500,))
    rows = [
        [RankTensor("a", "F32", (1000,), (whole,), True, ""),
         RankTensor("b", "F64", (1000,), (Box((500 * (r % 2),), (500,)),), True, ""),
         RankTensor("c", "U8", (1000,), (whole,), False, ""), RankTensor("d", "F32", (1000,), (whole,), True, "a")]
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
