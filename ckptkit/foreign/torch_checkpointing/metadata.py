"""`metadata.pkl` of torch_checkpointing: which file each rank wrote of each item, and how tensors were cut over ranks.

It is a pickled dict of dicts, lists, strings and numbers. Reading it runs nothing: see `restricted_pickle`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptkit.foreign.checks import checked, inner_file, row_of_sizes, shown
from ckptkit.foreign.torch_files.restricted_pickle import parsed
from ckptkit.format.state_tree import part
from ckptkit.model.mesh_cut import MeshPart, mesh_cut
from threefold.errors import UserError

FILE, VERSION, MAX_RANKS = "metadata.pkl", "2.0", 1 << 20
TORCH, CUT = "TorchSerialization", "DTensorShardingMetadata"
Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SavedCut:
    """How a tensor is cut over a mesh of ranks, those that hold the same included."""

    dtype: str
    shape: Ints
    mesh_shape: Ints
    ranks: Ints
    placements: tuple[Mapping[str, Any], ...]

    def parts(self, rank: int) -> tuple[tuple[MeshPart, ...], Ints]:
        """Return the parts that a rank holds, and the shape of its own tensor."""
        number, cuts = self.ranks.index(rank), []
        places = list[int]()
        for size in reversed(self.mesh_shape):
            places.insert(0, number % size)
            number //= size
        for placement, size, place in zip(self.placements, self.mesh_shape, places, strict=True):
            if placement["type"] != "Replicate":
                cuts.append((int(placement["dim"]), int(placement.get("split_factor", 1)), size, place))
        return mesh_cut(self.shape, tuple(cuts))


@dataclass(frozen=True, slots=True)
class Item:
    """One item of a save: the file of each rank, and by path the cut of each tensor."""

    files: Mapping[int, str]
    cuts: Mapping[str, tuple[SavedCut, ...]]  # one for each mesh


@dataclass(frozen=True, slots=True)
class SavedItems:
    """What the file says: the number of ranks, and the items that it describes."""

    world_size: int
    items: Mapping[str, Item]


def read_items(data: bytes, where: str) -> SavedItems:
    """Return what `metadata.pkl` says, checked; CheckFailed or UserError if it is damaged or not understood."""
    fields = parsed(data, frozenset(), where)
    with checked(f"{where} is not what torch_checkpointing writes"):
        version, world_size = fields["version"], fields["world_size"]
        if version != VERSION:
            text = f"{where} is of version {shown(version)}, known is {VERSION}"
            raise UserError(text, hint="load it with torch_checkpointing 0.1 and save it again")
        if type(world_size) is not int or not 0 < world_size <= MAX_RANKS:
            raise ValueError(f"{shown(world_size)} ranks")
        return SavedItems(world_size, {key: _item(key, item, where) for key, item in fields["metadata"].items()})


def _item(key: str, item: Mapping[str, Any], where: str) -> Item:
    files = {}
    for rank, layout in item["rank_to_layout_info"].items():
        if layout is not None and layout["serialization_format"]["type"] != TORCH:
            kind = layout["serialization_format"]["type"]
            raise UserError(f"{where}: {key} was saved by {shown(kind)}, which is not read", hint="save it by torch")
        if type(rank) is not int:
            raise ValueError(f"{shown(rank)} is not a rank")
        files[rank] = inner_file(f"{key}_{rank}.pt" if layout is None else layout["file_path"])
    cuts = {}
    for text, groups in item["nested_path_to_metadata"].items():
        path = "/".join([part(key), *map(part, json.loads(text))])
        cuts[path] = tuple([_cut(group["sharding_metadata"]) for group in groups])
        if len({(each.dtype, each.shape) for each in cuts[path]}) > 1:
            text = f"{where}: {path} has different dtypes or shapes on its ranks, which is not read"
            raise UserError(text, hint="save what each rank has for its own as an item without a resharder")
    return Item(files, cuts)


def _cut(described: Mapping[str, Any]) -> SavedCut:
    if described["type"] != CUT:
        raise ValueError(f"a tensor described by {shown(described['type'])}")
    data = described["data"]
    mesh = data["mesh_spec"]
    shape, mesh_shape, ranks = map(row_of_sizes, (data["global_shape"], mesh["mesh_shape"], mesh["mesh_data"]))
    placements = tuple(data["placements"])
    for placement in placements:
        if placement["type"] not in ("Shard", "StridedShard", "Replicate"):
            raise ValueError(f"placement {shown(placement['type'])}")
        if placement["type"] != "Replicate" and not 0 <= placement["dim"] < len(shape):
            raise ValueError(f"a cut of dim {shown(placement['dim'])} of {len(shape)} dims")
    return SavedCut(data["dtype"].removeprefix("torch."), shape, mesh_shape, ranks, placements)
