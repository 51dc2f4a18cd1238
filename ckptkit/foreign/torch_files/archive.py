"""A file that `torch.save` made of nested values, read without torch: the values, tensors as places in the file.

Parsed by an allow-list that runs nothing. What is neither a tensor nor a value that a tree of a state holds is refused
with its place in the nest.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ckptkit.foreign.checks import checked, size_of
from ckptkit.foreign.torch_files import zip_reader
from ckptkit.foreign.torch_files.restricted_pickle import Name, Record
from ckptkit.foreign.torch_files.zip_reader import ITEMSIZES, PARAMETER, REBUILDS, StoredTensor, TorchZip
from threefold.errors import CheckFailed, UserError
from threefold.storage import Storage

WRAPPED, SUBCLASS = "torch._tensor._rebuild_from_type_v2", "torch._utils._rebuild_wrapper_subclass"
DTENSOR, MESH = "torch.distributed.tensor", "torch.distributed"
DTENSORS = (f"{DTENSOR}.DTensor", f"{DTENSOR}.api.DTensor", f"{DTENSOR}._api.DTensor")
BYTES, ENCODE = ("__builtin__.bytes", "builtins.bytes"), "_codecs.encode"
ALLOWED = zip_reader.ALLOWED | frozenset([
    WRAPPED, SUBCLASS, *DTENSORS, "torch.Size", "torch.device", "torch.serialization._get_layout",
    "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer", "collections.defaultdict",
    *(f"{module}.{kind}" for module in ("__builtin__", "builtins") for kind in ("bytes", "dict", "list", "int")),
    ENCODE, *(f"{MESH}.{name}" for name in (
        "device_mesh.DeviceMesh", "_mesh_layout._MeshLayout", "_mesh_layout._FlatLayout",
    )),
    *(f"{DTENSOR}._dtensor_spec.{name}" for name in ("DTensorSpec", "TensorMeta", "ShardOrderEntry")),
    *(f"{DTENSOR}.placement_types.{name}" for name in ("Shard", "Replicate", "_StridedShard", "Partial")),
])  # fmt: skip


@dataclass(frozen=True, slots=True)
class Local:
    """What a file holds of a tensor that is cut over ranks: one rank's part."""

    tensor: StoredTensor


def read_archive(storage: Storage, key: str, others: Collection[str] = ()) -> Any:
    """Return the values of a file, tensors as a StoredTensor or Local; CheckFailed or UserError if that cannot be.

    What is named in `others` may be among the values, and stays a Record.
    """
    with _opened(storage, key) as (archive, where):
        archive.locate()
        return _built(archive.described(ALLOWED | frozenset(others)), archive, where, "", others)


def description(storage: Storage, key: str, others: Collection[str]) -> Any:
    """Return what the description of a file says, its tensors as Records."""
    with _opened(storage, key) as (archive, _):
        return archive.described(ALLOWED | frozenset(others))


@contextmanager
def _opened(storage: Storage, key: str) -> Iterator[tuple[TorchZip, str]]:
    where, size = f"{storage.url}/{key}", size_of(storage, key)
    with checked(f"{where} is not a file as torch.save writes it"):
        try:
            yield TorchZip(storage, key, 0, size, where), where
        except RecursionError:
            raise CheckFailed(f"{where} holds values that are nested too deep") from None


def dtype_of(value: Any) -> str | None:
    """Return torch's name of the dtype of what is a tensor in a file, None for anything else."""
    tensor = value.tensor if isinstance(value, Local) else value
    return tensor.dtype if isinstance(tensor, StoredTensor) else None


def _built(value: Any, archive: TorchZip, where: str, path: str, others: Collection[str] = ()) -> Any:
    """Return a value with its tensors placed; a path joins keys by a slash."""
    match value:
        case None | bool() | int() | float() | complex() | str() | bytes() if type(value) is not Name:
            return value
        case list() | tuple():
            parts = [_built(part, archive, where, f"{path}/{number}", others) for number, part in enumerate(value)]
            return type(value)(parts)
        case dict():
            return {key: _built(part, archive, where, f"{path}/{key}", others) for key, part in value.items()}
        case Record() if value.name in REBUILDS:
            return archive.placed(value)
        case Record() if value.name == PARAMETER:
            return _built(value.args[0], archive, where, path)
        case Record() if value.name == WRAPPED:
            return _of_type(value, archive, where, path)
        case Record(name="torch.Size"):
            return tuple(value.args[0])
        case Record() if value.name == ENCODE:
            return value.args[0].encode("latin1")
        case Record(args=()) if value.name in BYTES:
            return b""
        case Record() if value.name in others:
            return value
    named = value if isinstance(value, Name) else getattr(value, "name", type(value).__name__)
    text = f"{where}: {path.lstrip('/') or 'the whole'} is of type {named}, which no checkpoint holds"
    raise UserError(text, hint="save it as numbers, strings, lists, dicts and tensors")


def _of_type(value: Record, archive: TorchZip, where: str, path: str) -> Any:
    """Return what a tensor of a class of its own is: a DTensor's part of this rank, or a plain tensor."""
    function, kind, args, state = value.args
    if function in REBUILDS:
        return archive.placed(Record(function, args))
    if function != SUBCLASS or kind not in DTENSORS:
        raise UserError(f"{where}: {path.lstrip('/')} is a tensor of class {kind}, which is not read")
    fields = state[1] if type(state) is tuple else state  # of slots
    local = _built(fields["_local_tensor"], archive, where, path)
    if not isinstance(local, StoredTensor) or local.dtype not in ITEMSIZES:
        raise ValueError(f"{path} is a DTensor without memory")
    return Local(local)
