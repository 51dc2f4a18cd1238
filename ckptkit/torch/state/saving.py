"""What a save writes: all ranks agree on the table and on who writes what, once for each structure of the state.

A save makes one small exchange between the ranks; one more follows if names, shapes, placements or the values that each
rank has for its own changed. Values go into a tensor of bytes a rank, `@state/@3`, padded so that its size seldom
changes: a key of which all ranks have the same tree is written by the first, one that differs by each.

What several ranks hold, as the replicas of DDP and HSDP do, is written once. Parameters, DTensors and optimizer states
of the same holders and item size make one bucket, cut into equal intervals, one a holder, so that all write as much.
Any other plain tensor may differ from rank to rank, a buffer for instance: the first rank that has it writes it.
"""

import json
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import torch

from ckptkit.format.state_tree import METADATA, STATE_NAME, VERSION, base_of, part
from ckptkit.loading.exchange import Exchange, agreed
from ckptkit.model.tensor import ITEMSIZE, Box, Piece, Placement, TensorInfo
from ckptkit.model.zero import bucket_offsets, overlaps, shard_interval
from ckptkit.torch.state.boxes import as_stored, flat_of, region
from ckptkit.torch.state.capture import Entry, Leaf, capture
from ckptkit.torch.state.objects import RNG
from threefold.errors import UserError, listed

LEAST_TREE_BYTES = 4096
Owners = dict[str, list[int | None]]  # of each key, by rank: the rank whose tree is this one's


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


@dataclass(frozen=True)
class Structure:
    """The table of a checkpoint and what this rank writes of it, while `key` stays the same."""

    key: object
    table: list[TensorInfo]
    shares: list[BoxShare]
    rows: dict[str, RankTensor]


@dataclass(frozen=True)
class Plan:
    """What one save takes: the pieces of this rank, the table, metadata for the root, and a token of the first rank.

    `late` are the tensors whose memory pieces are views of, and that change in an optimizer's step alone, by name.
    `status` has the most of each number that the ranks said of themselves.
    """

    pieces: list[Piece]
    late: dict[str, torch.Tensor]
    table: list[TensorInfo]
    metadata: dict[str, Any]
    token: str
    status: dict[str, int]


class SavePlanner:
    """Plans the saves of one run; it keeps the last structure, which most saves share."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._structure: Structure | None = None

    def plan(
        self, step: int, state: Mapping[str, Any], token: str, check: Callable[[], dict[str, Any]],
        status: Mapping[str, int],
    ) -> Plan:  # fmt: skip
        """Return what this rank writes; all ranks call this together, an error of one is raised on all.

        `check` returns the metrics to record, of which the first rank's count, and raises what else is wrong with the
        save; `status` is what this rank says of itself.
        """
        entries: dict[str, Entry] = {}

        def message() -> bytes:
            metrics = check()
            entries.update(capture(state))
            keys = {key: [each.digest, len(each.tree), each.is_own] for key, each in entries.items()}
            return json.dumps({"step": step, "keys": keys, "rows": _digest(entries), "token": token,
                               "status": status, "metrics": metrics}).encode()  # fmt: skip

        heard = [json.loads(each) for each in agreed(self._exchange, message)]
        if len({each["step"] for each in heard}) > 1:
            raise UserError(f"ranks save different steps: {sorted({each['step'] for each in heard})}")
        owners = owners_of([each["keys"] for each in heard])
        sizes = [_tree_bytes(rank, each["keys"], owners) for rank, each in enumerate(heard)]
        own = {key for each in heard for key, (_, _, is_own) in each["keys"].items() if is_own}
        varied = {key: ranks for key, ranks in owners.items() if len(set(ranks) - {None}) > 1 or key == RNG}
        key = ([each["rows"] for each in heard], sizes, {name: varied[name] for name in varied if name in own})
        leaves = self._named(entries, own & varied.keys(), owners)
        if self._structure is None or self._structure.key != key:
            self._structure = self._agree(key, leaves, sizes[self._exchange.rank])
        pieces, late = _pieces(self._structure, leaves, self._tree(entries, owners, sizes))
        most = {name: max(each["status"][name] for each in heard) for name in status}
        described = {"version": VERSION, "world_size": len(heard), "keys": list(owners), "owners": varied,
                     "own": sorted(own & varied.keys())}  # fmt: skip
        metadata = {**heard[0]["metrics"], METADATA: described}
        return Plan(pieces, late, self._structure.table, metadata, heard[0]["token"], most)

    def _named(self, entries: Mapping[str, Entry], varied: set[str], owners: Owners) -> dict[str, Leaf]:
        """Return this rank's tensors by the names that they are stored under."""
        rank, named = self._exchange.rank, dict[str, Leaf]()
        for key, entry in entries.items():
            if key in varied and owners[key][rank] != rank:
                continue  # another rank has the same
            base = base_of(key, owners[key][rank] if key in varied else None)
            named |= {base + path[len(part(key)) :]: leaf for path, leaf in entry.leaves.items()}
        return named

    def _agree(self, key: object, leaves: Mapping[str, Leaf], num_bytes: int) -> Structure:
        rank = self._exchange.rank
        own_rows = [_row(name, leaf) for name, leaf in leaves.items()]
        if num_bytes:
            whole = Box((0,), (num_bytes,))
            own_rows.append(RankTensor(f"{STATE_NAME}{rank}", "U8", (num_bytes,), (whole,), False, ""))
        rows = [own_rows] if self._exchange.size == 1 else self._rows_of_all(own_rows)
        table = table_of(rows)
        shares = shares_of(rank, rows, table)
        return Structure(key, table, shares, {row.name: row for row in own_rows})

    def _rows_of_all(self, own_rows: list[RankTensor]) -> list[list[RankTensor]]:
        """Return the rows of every rank; of those that say the same they are made once."""
        packed = zlib.compress(json.dumps([row.to_json() for row in own_rows]).encode(), 1)
        heard = agreed(self._exchange, lambda: packed)
        known = {packed: own_rows}
        for each in heard:
            if each not in known:
                known[each] = [RankTensor.from_json(row) for row in json.loads(zlib.decompress(each))]
        return [known[each] for each in heard]

    def _tree(self, entries: Mapping[str, Entry], owners: Owners, sizes: list[int]) -> torch.Tensor:
        """Return the trees that this rank writes, as one JSON object of bytes with spaces behind."""
        rank = self._exchange.rank
        mine = [key for key in entries if owners[key][rank] == rank]
        text = b"{" + b",".join(json.dumps(key).encode() + b":" + entries[key].tree for key in mine) + b"}"
        return torch.from_numpy(np.frombuffer(text.ljust(sizes[rank]), np.uint8).copy())


def owners_of(keys_by_rank: list[dict[str, list[Any]]]) -> Owners:
    """Return for each key, by rank, the first rank that has the same tree; of random states each has its own."""
    owners: Owners = {}
    first: dict[tuple[str, str], int] = {}
    for rank, keys in enumerate(keys_by_rank):
        for key, (digest, _, _) in keys.items():
            by_rank = owners.setdefault(key, [None] * len(keys_by_rank))
            by_rank[rank] = rank if key == RNG else first.setdefault((key, digest), rank)
    return owners


def _tree_bytes(rank: int, keys: Mapping[str, list[Any]], owners: Owners) -> int:
    """Return the padded bytes of the trees that a rank writes, 0 if it writes none: a power of two in eighths."""
    mine = [len(json.dumps(key)) + 2 + length for key, (_, length, _) in keys.items() if owners[key][rank] == rank]
    if not mine:
        return 0
    size: int = max(2 + sum(mine), LEAST_TREE_BYTES)
    step: int = 1 << max(size.bit_length() - 4, 0)
    return math.ceil(size / step) * step


def _digest(entries: Mapping[str, Entry]) -> int:
    """Return a number that changes with what tensors there are: names, dtypes, shapes, parts, ties.

    It is compared with those of earlier saves of this process alone.
    """
    return hash(tuple([
        (key, path, leaf.stored, leaf.is_equal, leaf.same_as)
        for key, entry in entries.items()
        for path, leaf in entry.leaves.items()
    ]))  # fmt: skip


def _row(name: str, leaf: Leaf) -> RankTensor:
    boxes = tuple(each.box for each in leaf.stored.parts)
    return RankTensor(name, leaf.stored.dtype, leaf.stored.shape, boxes, leaf.is_equal, leaf.same_as)


def _pieces(
    structure: Structure, leaves: Mapping[str, Leaf], tree: torch.Tensor
) -> tuple[list[Piece], dict[str, torch.Tensor]]:
    """Return the memory of this rank's shares: views of the live state, copies of what is not contiguous.

    Beside it the tensors by name whose views may be copied late.
    """
    pieces, late, flat = [], dict[str, torch.Tensor](), dict[tuple[str, int], torch.Tensor]()
    for share in structure.shares:
        box = structure.rows[share.name].boxes[share.number]
        at = (share.name, share.number)
        leaf = leaves.get(share.name)
        if leaf is None:
            flat[at] = tree
        elif at not in flat:
            with torch.no_grad():
                flat[at] = flat_of(region(as_stored(leaf.local), leaf.stored.parts[share.number]))
            if leaf.is_late:
                late[share.name] = leaf.tensor
        pieces.append(Piece(share.name, box, share.start, share.stop, flat[at][share.start : share.stop]))
    return pieces, late


def as_numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics as plain numbers; UserError for what is not a number."""
    numbers: dict[str, Any] = {}
    if not isinstance(metrics, Mapping):
        raise UserError(f"metrics are a dict of numbers, not {metrics!r}", hint='metrics={"val_loss": 2.1}')
    for name, value in metrics.items():
        if type(value) is int and value.bit_length() > 1023:
            raise UserError(f"the metric {name!r} is an int of {value.bit_length():,} bits", hint="float(value)")
        number = value.item() if hasattr(value, "item") and math.prod(value.shape) == 1 else value
        if type(name) is not str or name == METADATA or not isinstance(number, Real):
            raise UserError(
                f"the metric {name!r} is {value!r}, not a number under a name of its own",
                hint='metrics={"val_loss": 2.1}',
            )
        numbers[name] = number if isinstance(number, bool | int) else float(number)
    return numbers
