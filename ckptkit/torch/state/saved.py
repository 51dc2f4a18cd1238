"""SavedKeys: what a checkpoint of a PyTorch program holds: the trees of its keys, as this rank is to see them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from shlex import quote
from typing import Any

import torch

from ckptkit.format.state_tree import METADATA, VERSION, Node, base_of, merged, part
from ckptkit.io.torch_tensors import NAMES
from ckptkit.loading.exchange import agreed
from ckptkit.loading.reader import CheckpointReader
from ckptkit.loading.restore import read_trees, restore_from
from ckptkit.model.tensor import ITEMSIZE, Box, Piece
from ckptkit.torch.state.objects import RNG
from threefold.errors import UserError
from threefold.installing import NEWER

COMPARED_BYTES = 64 << 20  # of each of two tensors, at once


@dataclass(frozen=True)
class SavedKey:
    """The tree of one key, what the names of its tensors begin with, and what of it is another rank's alone."""

    node: Node
    base: str
    fault: str = ""


@dataclass(frozen=True)
class Tie:
    """Two paths that are one tensor in the program, the names that they have in the checkpoint, and what is here."""

    paths: tuple[str, str]
    names: tuple[str, str]
    boxes: Sequence[Box]


class SavedKeys:
    """The keys of a checkpoint; `rank` and `world_size` are those of the program that loads."""

    def __init__(self, reader: CheckpointReader, rank: int, world_size: int) -> None:
        """Read the trees; UserError if ckptkit.torch did not save them."""
        root, self._reader = reader.root, reader
        described = root.metadata.get(METADATA)
        if not isinstance(described, Mapping):
            raise UserError(
                f"{reader.url} was not saved by ckptkit.torch",
                hint=f"see what it holds: ckptkit inspect {quote(reader.url)}",
            )
        if described.get("version") != VERSION:
            raise UserError(
                f"{reader.url} has state of version {described.get('version')!r}, this program reads {VERSION}",
                hint=NEWER,
            )
        self.url, self.root = reader.url, root
        self.world_size = int(described["world_size"])
        self._owners: Mapping[str, list[int | None]] = described["owners"]
        self._own, self._rank, self._is_same_size = set(described["own"]), rank, world_size == self.world_size
        self._trees = read_trees(reader)
        self.keys = list(described["keys"])

    @property
    def metrics(self) -> dict[str, Any]:
        """What the save was given as metrics."""
        return {name: value for name, value in self.root.metadata.items() if name != METADATA}

    def key(self, name: str) -> SavedKey | None:
        """Return what a key holds for this rank; None if the checkpoint lacks it, or for random states this rank's."""
        owners = self._owners.get(name, [0] if self._owners.get(name) is None else [])
        by_rank = {rank: tree[name] for rank, tree in self._trees.items() if name in tree}
        if not by_rank:
            return None
        if name == RNG:
            node = by_rank.get(self._rank)
            return None if node is None else SavedKey(node, base_of(RNG, self._rank))
        mine = owners[self._rank] if self._rank < len(owners) else None
        first = next(iter(by_rank)) if mine is None or mine not in by_rank else mine
        if name in self._own:
            fault = "" if self._is_same_size else self._of_ranks(name)
            return SavedKey(by_rank[first], base_of(name, first), fault)
        conflicts: list[str] = []
        others = [tree for rank, tree in by_rank.items() if rank != first]
        node = merged(part(name), [by_rank[first], *others], conflicts)
        fault = self._of_ranks(conflicts[0]) if conflicts and not self._is_same_size else ""
        return SavedKey(node, part(name), fault)

    def differing(self, ties: Sequence[Tie]) -> list[Tie]:
        """Return the ties whose tensors differ in the checkpoint; they are read unless that is known.

        Ranks that read together call this together, each with ties of its own.
        """
        table, differ, compared = self.root.tensors, set[int](), list[tuple[int, list[Piece]]]()
        for number, tie in enumerate(ties):
            first, second = (table[table[name].placement.tied_to or name] for name in tie.names)
            if (first.dtype, first.shape) != (second.dtype, second.shape):
                differ.add(number)
            elif first.name != second.name:
                length = COMPARED_BYTES // ITEMSIZE[first.dtype]
                compared += [
                    (number, [Piece(name, box, start, min(start + length, box.numel), None) for name in names])
                    for names in [(first.name, second.name)]
                    for box in tie.boxes for start in range(0, box.numel, length)
                ]  # fmt: skip
        exchange = self._reader.exchange
        for turn in range(max(int(each) for each in agreed(exchange, lambda: str(len(compared)).encode()))):
            number, wanted = compared[turn] if turn < len(compared) else (-1, [])
            wanted = [] if number in differ else wanted
            if (wanted or exchange.size > 1) and not self._are_equal(wanted):
                differ.add(number)
        return [ties[number] for number in sorted(differ)]

    def _are_equal(self, places: Sequence[Piece]) -> bool:
        """Return whether what is wanted has the same bytes, or is nothing; it is read."""
        tensors = self.root.tensors
        pieces = [
            replace(
                piece,
                data=torch.empty(piece.stop - piece.start, dtype=getattr(torch, NAMES[tensors[piece.name].dtype])),
            )
            for piece in places
        ]
        restore_from(self._reader, pieces, certify=False)
        return not pieces or torch.equal(*(piece.data.view(torch.uint8) for piece in pieces))

    def _of_ranks(self, path: str) -> str:
        return f"{path}: each of the {self.world_size} ranks that saved it had its own"
