"""A folder that torch_checkpointing saved, with the face of a run of one step: `torch_checkpointing:FOLDER`.

Each rank wrote each item of the state by `torch.save`, as `model_3.pt`; `metadata.pkl` says how tensors are cut, if the
item was saved with a resharder. The step is one of `ckptkit.torch.Run`: tensors whole and under its names, other values
in its tree. What ranks saved of an item without a description, each has for its own. `metadata.pkl` is a pickled dict
of dicts, lists, strings and numbers; reading it runs nothing: see `restricted_pickle`. The folder has no checksums.
torch is not needed.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ckptkit.foreign.checks import checked, checked_size, inner_file, row_of_sizes, shown
from ckptkit.foreign.folder import FolderSource, ForeignFolder
from ckptkit.foreign.stored_parts import Found, stored_source, table_of
from ckptkit.foreign.torch_files.archive import ITEMSIZES, Local, StoredTensor, dtype_of, read_archive
from ckptkit.foreign.torch_files.restricted_pickle import MAX_BYTES, parsed
from ckptkit.format.root import Root
from ckptkit.format.state_tree import METADATA, STATE_NAME, VERSION, Encoder, Node, base_of, part
from ckptkit.io.blocks import shown_names
from ckptkit.model.layout import ParallelLayout
from ckptkit.model.mesh_cut import MeshPart, mesh_cut
from ckptkit.model.tensor import Box
from threefold.cli import log
from threefold.errors import CheckFailed, UserError

FILE, FILE_VERSION, MAX_RANKS = "metadata.pkl", "2.0", 1 << 20
TORCH, CUT = "TorchSerialization", "DTensorShardingMetadata"
Ints = tuple[int, ...]
NUM_THREADS, MAX_NAMED = 8, 5
NAMED = re.compile(r"(.+)_(0|[1-9][0-9]{0,6})\.pt")


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
        if version != FILE_VERSION:
            text = f"{where} is of version {shown(version)}, known is {FILE_VERSION}"
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


@dataclass
class Contents:
    """What a folder holds: the elements of tensors, and by rank the trees of values of each item."""

    world_size: int
    files: dict[str, int]
    tensors: dict[str, tuple[str, Ints]] = field(default_factory=dict)
    boxes: dict[tuple[str, Box], Found] = field(default_factory=dict)
    trees: dict[int, dict[str, Node]] = field(default_factory=dict)
    owners: dict[str, list[int | None]] = field(default_factory=dict)  # of items of which not all have one tree
    own: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)

    def add(self, chunk: Found, shape: Ints) -> None:
        """Add a box of a tensor, unless it is there."""
        self.boxes.setdefault((chunk.name, chunk.box), chunk)
        self.tensors.setdefault(chunk.name, (chunk.place.dtype, shape))

    @property
    def state(self) -> dict[str, bytes]:
        """The trees as a run holds them: a tensor of bytes for each rank that has one."""
        return {f"{STATE_NAME}{rank}": json.dumps(tree).encode() for rank, tree in sorted(self.trees.items())}


class TorchCheckpointingFolder(ForeignFolder):
    """One folder, with the methods of a Run that holds one step, 0; nothing is read before the first of them."""

    scheme = "torch_checkpointing:"

    @cached_property
    def contents(self) -> Contents:
        """Return what the folder holds; CheckFailed or UserError if it is not sound or not understood."""
        sizes = {info.key: info.size_bytes for info in self.storage.list()}
        described = self._described(sizes)
        files: dict[str, dict[int, str]] = {key: dict(item.files) for key, item in described.items.items()}
        named = {FILE, *(name for by_rank in files.values() for name in by_rank.values())}
        for name in sorted(sizes.keys() - named):
            if match := NAMED.fullmatch(name):
                files.setdefault(match[1], {})[int(match[2])] = name
                named.add(name)
        if not files:
            raise CheckFailed(f"{self.storage.url} holds no item", hint="name a folder that torch_checkpointing saved")
        if others := sorted(sizes.keys() - named):
            log(f"warning: {self.url} holds what is not read: {shown_names(others)}")
        ranks = [rank for by_rank in files.values() for rank in by_rank]
        contents = Contents(max(described.world_size, 1 + max(ranks)), {n: sizes[n] for n in named if n in sizes})
        wanted = [(key, rank, name) for key, by_rank in files.items() for rank, name in sorted(by_rank.items())]
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            values = list(pool.map(lambda each: read_archive(self.storage, each[2]), wanted))
        self._warn_of_gaps(files, described, contents.world_size)
        for key, by_rank in files.items():
            of_item = {rank: value for (k, rank, _), value in zip(wanted, values, strict=True) if k == key}
            _ItemReader(self.storage.url, key, by_rank, of_item, described.items.get(key)).add_to(contents)
        return contents

    def _warn_of_gaps(self, files: Mapping[str, Mapping[int, str]], described: SavedItems, world_size: int) -> None:
        """Say of which ranks there is nothing of an item that others have: a lost file looks like that too."""
        for key, by_rank in files.items():
            absent = sorted(set(range(world_size)) - by_rank.keys())
            if absent and len(by_rank) > 1 and key not in described.items:
                text = f"{self.url} has {key} of {len(by_rank):,} of {world_size:,} ranks"
                log(f"warning: {text}, none of {named_ranks(absent)}: no file says whether these had it")

    def _described(self, sizes: Mapping[str, int]) -> SavedItems:
        if FILE not in sizes:
            return SavedItems(1, {})
        where = f"{self.storage.url}/{FILE}"
        checked_size(where, sizes[FILE], MAX_BYTES)
        return read_items(self.storage.read(FILE), where)

    @property
    def files(self) -> Collection[str]:
        """The files that are read."""
        return self.contents.files

    def open(self, step: int, exchange: object = None) -> FolderSource:
        """Return a reader, for a `with`; the ranks of an exchange read each for itself."""
        contents = self.contents
        found = list(contents.boxes.values())
        return stored_source(self.storage, self.root(step), self.url, contents.files, found, contents.state)

    def root(self, step: int, exchange: object = None) -> Root:
        """Return the root that a run has whose step this folder is."""
        contents = self.contents
        tensors = table_of(self.url, contents.tensors, {name: len(data) for name, data in contents.state.items()})
        state = {"version": VERSION, "world_size": contents.world_size, "keys": contents.keys,
                 "owners": contents.owners, "own": contents.own}  # fmt: skip
        return Root(step, self.attempt, ParallelLayout(), 1, tensors, (), {METADATA: state})


def named_ranks(ranks: Sequence[int]) -> str:
    """Return some ranks in words, the first few by number."""
    more = f" and {len(ranks) - MAX_NAMED:,} more" if len(ranks) > MAX_NAMED else ""
    return f"rank{'s' if ranks[1:] else ''} {', '.join(map(str, ranks[:MAX_NAMED]))}{more}"


class _ItemReader:
    """One item of a save: the values that each rank's file has, and what describes them, if anything does."""

    def __init__(
        self, url: str, key: str, files: Mapping[int, str], values: Mapping[int, Any], item: Item | None
    ) -> None:
        self._url, self._key, self._files, self._item = url, key, files, item
        self._arrays: dict[int, dict[str, StoredTensor | Local]] = {}
        self._nodes: dict[int, Node] = {}
        for rank, value in values.items():
            encoder = Encoder(dtype_of)
            try:
                self._nodes[rank] = encoder.node(part(key), value)
            except UserError as error:
                raise UserError(f"{url}/{files[rank]}: {error.message}", hint=error.hint) from None
            self._arrays[rank] = encoder.arrays

    def add_to(self, contents: Contents) -> None:
        """Add the item to what its folder holds."""
        contents.keys.append(self._key)
        first: dict[str, int] = {}
        owners: list[int | None] = [None] * contents.world_size
        is_own = self._item is None and len(self._nodes) > 1 and any(self._arrays.values())
        for rank, node in self._nodes.items():
            owner = rank if is_own else first.setdefault(json.dumps(node), rank)
            owners[rank] = owner
            if owner == rank:
                contents.trees.setdefault(rank, {})[self._key] = node
        if is_own:
            contents.own.append(self._key)
        if len(set(owners) - {None}) > 1:
            contents.owners[self._key] = owners
        cuts = self._item.cuts if self._item is not None else {}
        for rank, arrays in self._arrays.items():
            base = base_of(self._key, rank if is_own else None)
            for path, array in arrays.items():
                name = base + path[len(part(self._key)) :]
                if path in cuts:
                    self._add_cut(contents, name, rank, array, cuts[path])
                elif isinstance(array, Local):
                    text = f"{self._url}/{self._files[rank]}: {path} is cut over ranks, and nothing says how"
                    raise UserError(text, hint="save it with ItemSpec(resharder=DefaultResharder())")
                else:
                    contents.add(Found(name, Box.whole(array.shape), self._files[rank], array), array.shape)

    def _add_cut(
        self, contents: Contents, name: str, rank: int, array: StoredTensor | Local, cuts: Sequence[SavedCut]
    ) -> None:
        """Add what a rank holds of a tensor that is cut, but for what another has too."""
        local, file = array.tensor if isinstance(array, Local) else array, self._files[rank]
        cut = next((each for each in cuts if rank in each.ranks), None)
        if cut is None:
            raise CheckFailed(f"{self._url}/{file} holds {name}, {FILE} says that rank {rank} does not")
        parts, shape = cut.parts(rank)
        if (local.dtype, local.shape) != (cut.dtype, shape):
            there = f"{local.dtype} {list(local.shape)}, {FILE} says {cut.dtype} {list(shape)}"
            raise CheckFailed(f"{self._url}/{file}: {name} is {there}")
        contents.tensors.setdefault(name, (local.dtype, cut.shape))  # of which ranks, or all, may hold no element
        size = ITEMSIZES[local.dtype]
        for each in parts:
            at = local.offset + size * sum(a * step for a, step in zip(each.at, local.stride, strict=True))
            chunk = StoredTensor(local.dtype, each.box.shape, local.stride, at, local.end)
            contents.add(Found(name, each.box, file, chunk), cut.shape)
