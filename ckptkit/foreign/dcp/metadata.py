"""`.metadata` of torch.distributed.checkpoint (DCP): what a folder holds and where, read and written without torch.

It is pickled. Reading it runs nothing: see `restricted_pickle`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.foreign.checks import checked, inner_file, row_of_sizes, shown
from ckptkit.foreign.stored_parts import Place
from ckptkit.foreign.torch_files.archive import ITEMSIZES
from ckptkit.foreign.torch_files.pickle_writer import Call, Global, Made, Pairs, pickled
from ckptkit.foreign.torch_files.restricted_pickle import GETATTR, Name, Record, parsed
from ckptkit.format.dcp_state import Path, checked_path
from threefold.errors import UserError

FILE, VERSION = ".metadata", "1.0.0"
_FLATTENED = "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata"
_MODULE, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
ALLOWED = frozenset([
    *(f"{_MODULE}.{name}" for name in (
        "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "BytesStorageMetadata",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )),
    f"{_FILES}._StorageInfo", GETATTR, "torch.Size", "torch.serialization._get_layout", "collections.OrderedDict",
    *(f"{module}.{name}" for module in ("pathlib", "pathlib._local")
      for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")),
    *(f"torch.{dtype}" for dtype in ITEMSIZES),
    # plans that megatron-core keeps beside, which nothing here needs
    *(f"torch.distributed.checkpoint.planner.{name}" for name in (
        "SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData",
    )), _FLATTENED,
])  # fmt: skip
Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DcpChunk:
    """A box of a tensor, and where it is."""

    offset: Ints
    shape: Ints
    place: Place


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A tensor of torch's dtype, in chunks."""

    dtype: str
    shape: Ints
    chunks: Sequence[DcpChunk]


@dataclass(frozen=True)
class DcpContents:
    """What a folder holds: tensors, pickled values, and where they are in the nested state, None if that is flat."""

    tensors: Mapping[str, DcpTensor]
    blobs: Mapping[str, Place]
    paths: Mapping[str, Path] | None


def read_metadata(data: bytes, where: str) -> DcpContents:
    """Return what `.metadata` says, checked; CheckFailed or UserError if it is damaged or not understood."""
    record = parsed(data, ALLOWED, where)
    with checked(f"{where} is not what torch.distributed.checkpoint writes"):
        fields = _fields(record, f"{_MODULE}.Metadata")
        if fields.get("mcore_data"):
            text = f"{where} is of a megatron-core that saved optimizer states in one dimension, which are not read"
            raise UserError(text, hint="load it with megatron-core 0.16 or newer and save it again")
        places = {_index(key): _place(value, where) for key, value in fields["storage_data"].items()}
        tensors, blobs = dict[str, DcpTensor](), dict[str, Place]()
        for name, described in fields["state_dict_metadata"].items():
            if not isinstance(name, str):
                raise ValueError(f"{shown(name)} is not a name")
            if described.name == f"{_MODULE}.BytesStorageMetadata":
                blobs[name] = places[_place_key(name, None)]
            else:
                tensors[name] = _tensor(name, _fields(described, f"{_MODULE}.TensorStorageMetadata"), places, where)
        paths = fields.get("planner_data")
        return DcpContents(tensors, blobs, None if paths is None else {n: checked_path(p) for n, p in paths.items()})


def _fields(record: Any, name: str) -> dict[str, Any]:
    if not isinstance(record, Record) or record.name != name or not isinstance(record.state, dict):
        raise ValueError(f"{shown(record)} where {name} is expected")
    return record.state


def _index(record: Any) -> str:
    fields = _fields(record, f"{_MODULE}.MetadataIndex")
    offset = fields.get("offset")
    if not isinstance(fields["fqn"], str):
        raise ValueError(f"{shown(fields['fqn'])} is not a name")
    return _place_key(fields["fqn"], None if offset is None else _size(offset))


def _place_key(name: str, offset: Ints | None) -> str:
    """Return what a chunk is looked up by: a text, as hashes of numbers could be chosen to be one and the same."""
    return f"{offset} {name}"


def _size(value: Any) -> Ints:
    """Return a torch.Size; ValueError for what is not one."""
    if isinstance(value, Record) and value.name == "torch.Size":
        [value] = value.args or ((),)
    return row_of_sizes(value)


def _place(record: Any, where: str) -> Place:
    fields = _fields(record, f"{_FILES}._StorageInfo")
    if transforms := fields.get("transform_descriptors"):
        raise UserError(
            f"{where}: files were written through {shown(transforms)}, which is not read", hint="save without it"
        )
    return Place(inner_file(fields["relative_path"]), *row_of_sizes((fields["offset"], fields["length"])))


def _tensor(name: str, fields: Mapping[str, Any], places: Mapping[str, Place], where: str) -> DcpTensor:
    dtype, layout, *_ = fields["properties"].state
    if not isinstance(dtype, Name) or layout.args != ("torch.strided",):
        kind = f"{shown(dtype)} and layout {shown(layout.args[0] if layout.args else None)}"
        raise UserError(f"{where}: {name} is a tensor of {kind}, which is not read")
    shape, chunks = _size(fields["size"]), []
    for described in fields["chunks"]:
        box = _fields(described, f"{_MODULE}.ChunkStorageMetadata")
        offset, size = _size(box["offsets"]), _size(box["sizes"])
        if any(a + n > whole for a, n, whole in zip(offset, size, shape, strict=True)):
            raise ValueError(f"{name} {list(shape)} has a chunk {list(size)} at {list(offset)}")
        chunks.append(DcpChunk(offset, size, places[_place_key(name, offset)]))
    return DcpTensor(dtype.removeprefix("torch."), shape, chunks)


def write_metadata(contents: DcpContents) -> bytes:
    """Return `.metadata` of a folder."""
    storage: list[tuple[Made, Made]] = []
    described: dict[str, Any] = {}
    for name, place in contents.blobs.items():
        described[name] = Made(Global(_MODULE, "BytesStorageMetadata"))
        storage.append((_made_index(name, None), _made_place(place)))
    for name, tensor in contents.tensors.items():
        chunks = []
        for number, chunk in enumerate(tensor.chunks):
            sizes = {"offsets": _made_size(chunk.offset), "sizes": _made_size(chunk.shape)}
            chunks.append(Made(Global(_MODULE, "ChunkStorageMetadata"), sizes))
            storage.append((_made_index(name, chunk.offset, number), _made_place(chunk.place)))
        layout = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
        is_contiguous = Call(Global(_MODULE, "_MEM_FORMAT_ENCODING"), (0,))
        properties = (Global("torch", tensor.dtype), layout, False, is_contiguous, False)
        described[name] = Made(Global(_MODULE, "TensorStorageMetadata"), {
            "properties": Made(Global(_MODULE, "TensorProperties"), properties),
            "size": _made_size(tensor.shape), "chunks": chunks,
        })  # fmt: skip
    return pickled(Made(Global(_MODULE, "Metadata"), {
        "state_dict_metadata": described, "planner_data": None if contents.paths is None else dict(contents.paths),
        "storage_data": Pairs(storage), "storage_meta": None, "version": VERSION,
    }))  # fmt: skip


def _made_size(shape: Iterable[int]) -> Call:
    return Call(Global("torch", "Size"), (tuple(shape),))


def _made_index(name: str, offset: Ints | None, number: int | None = None) -> Made:
    state = {"fqn": name, "index": number} | ({} if offset is None else {"offset": _made_size(offset)})
    return Made(Global(_MODULE, "MetadataIndex"), state)


def _made_place(place: Place) -> Made:
    state = {"relative_path": place.file, "offset": place.offset, "length": place.length}
    return Made(Global(_FILES, "_StorageInfo"), state)
