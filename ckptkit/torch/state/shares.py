"""Shares: the tensor table of all ranks together, and which rank writes which part of each tensor. Pure.

What several ranks hold, as the replicas of DDP and HSDP do, is written once. Parameters, DTensors and optimizer states
of the same holders and item size make one bucket, cut into equal intervals, one a holder, so that all write as much.
Any other plain tensor may differ from rank to rank, a buffer for instance: the first rank that has it writes it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ckptkit.model.tensor import ITEMSIZE, Box, Placement, TensorInfo
from ckptkit.model.zero import bucket_offsets, overlaps, shard_interval
from threefold.errors import UserError, listed


@dataclass(frozen=True, slots=True)
class RankTensor:
    """A tensor as one rank has it. `tied_to` is the name of one whose memory it shares, None if that cannot be seen."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    is_equal: bool  # on all ranks that hold a box of it
    tied_to: str | None

    def to_json(self) -> list[object]:
        """Return it as JSON."""
        boxes = [[box.offset, box.shape] for box in self.boxes]
        return [self.name, self.dtype, self.shape, boxes, self.is_equal, self.tied_to]

    @classmethod
    def from_json(cls, row: list[object]) -> "RankTensor":
        """Return the row of its JSON."""
        name, dtype, shape, boxes, is_equal, tied_to = row
        made = tuple(Box(tuple(offset), tuple(size)) for offset, size in boxes)  # type: ignore[attr-defined]
        return cls(name, dtype, tuple(shape), made, is_equal, tied_to)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class BoxShare:
    """The positions [start, stop) of a box of a tensor that one rank writes; `number` counts its boxes."""

    name: str
    number: int
    start: int
    stop: int


def table_of(rows_by_rank: Sequence[Sequence[RankTensor]]) -> list[TensorInfo]:
    """Return the tensors of all ranks together; UserError names those that ranks have in several shapes or dtypes."""
    first: dict[str, tuple[int, RankTensor]] = {}
    ties: dict[str, set[str]] = {}
    faults = {}
    for rank, rows in enumerate(rows_by_rank):
        for row in rows:
            other, known = first.setdefault(row.name, (rank, row))
            if (row.dtype, row.shape) != (known.dtype, known.shape):
                faults[row.name] = (
                    f"{row.name}: {known.dtype} {list(known.shape)} on rank {other}, {row.dtype} {list(row.shape)} "
                    f"on rank {rank}"
                )
            if row.tied_to is not None:
                ties.setdefault(row.name, set()).add(row.tied_to)
    if faults:
        raise UserError(
            f"ranks have tensors of one name and other shapes:{listed(list(faults.values()))}",
            hint="pass what is cut over ranks as DTensors, or what is each rank's own under a key of its own",
        )
    infos, tied = [], dict[str, str]()
    for name, (_, row) in first.items():
        found = ties.get(name, set())
        [target] = found if len(found) == 1 else [""]
        if target in first and target not in tied and target != name:
            tied[name] = target
        infos.append(TensorInfo(name, row.dtype, row.shape, Placement("first", tied_to=tied.get(name))))
    return infos


def shares_of(rank: int, rows_by_rank: Sequence[Sequence[RankTensor]], table: Iterable[TensorInfo]) -> list[BoxShare]:
    """Return what one rank writes; all ranks' shares together are each element of the table once."""
    tied = {info.name for info in table if info.placement.tied_to is not None}
    if len(rows_by_rank) == 1:
        return [
            BoxShare(row.name, number, 0, box.numel)
            for row in rows_by_rank[0] if row.name not in tied for number, box in enumerate(row.boxes)
        ]  # fmt: skip
    holders: dict[tuple[str, Box], list[int]] = {}
    rows: dict[str, RankTensor] = {}
    for number, each in enumerate(rows_by_rank):
        for row in each:
            rows.setdefault(row.name, row)
            for box in row.boxes if row.name not in tied else ():
                holders.setdefault((row.name, box), []).append(number)
    numbers = {(row.name, box): number for row in rows_by_rank[rank] for number, box in enumerate(row.boxes)}
    buckets: dict[tuple[tuple[int, ...], int], list[tuple[str, Box]]] = {}
    shares = []
    for key, ranks in holders.items():
        row = rows[key[0]]
        if row.is_equal and len(ranks) > 1:
            buckets.setdefault((tuple(ranks), ITEMSIZE[row.dtype]), []).append(key)
        elif ranks[0] == rank:
            shares.append(BoxShare(key[0], numbers[key], 0, key[1].numel))
    for (ranks_of, itemsize), keys in buckets.items():
        if rank not in ranks_of:
            continue
        numels = [box.numel for _, box in keys]
        offsets, total = bucket_offsets(numels, itemsize)
        interval = shard_interval(total, len(ranks_of), ranks_of.index(rank), itemsize)
        for number, start, stop in overlaps(np.array(offsets), np.array(numels), *interval).tolist():
            shares.append(BoxShare(keys[number][0], numbers[keys[number]], start, stop))
    return shares
