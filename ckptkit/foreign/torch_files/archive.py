"""What `torch.save` makes, read without torch: a zip of uncompressed records, its tensors as places in the file.

`archive/data.pkl` is the pickled description, `archive/data/0` the first storage, little-endian. A file of
torch.distributed.checkpoint is such zips of a tensor each, one after the other. One of nested values is parsed by an
allow-list that runs nothing: what is neither a tensor nor a value that a tree of a state holds is refused with its
place in the nest.
"""

import io
import math
import struct
import zipfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ckptkit.foreign.checks import checked, shown, size_of
from ckptkit.foreign.torch_files.restricted_pickle import Name, Record, parsed
from threefold.errors import CheckFailed, UserError
from threefold.storage import Storage

WINDOW_BYTES, MAX_RECORD_BYTES = 4096, 256 << 20
# torch's dtypes -> bytes an element
ITEMSIZES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
    "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "complex128": 16, "complex64": 8, "complex32": 4, "uint64": 8,
    "uint32": 4, "uint16": 2, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip
STORAGES = {
    "float64": "Double", "float32": "Float", "float16": "Half", "bfloat16": "BFloat16", "int64": "Long", "int32": "Int",
    "int16": "Short", "int8": "Char", "uint8": "Byte", "bool": "Bool", "complex128": "ComplexDouble",
    "complex64": "ComplexFloat",
}  # fmt: skip
_OF_STORAGE = {f"torch.{kind}Storage": dtype for dtype, kind in STORAGES.items()}
UNTYPED, PARAMETER = "torch.storage.UntypedStorage", "torch._utils._rebuild_parameter"
REBUILDS = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")
OF_TENSORS = frozenset([
    *_OF_STORAGE, UNTYPED, *REBUILDS, PARAMETER, "collections.OrderedDict", *(f"torch.{dtype}" for dtype in ITEMSIZES)
])  # fmt: skip
Ints = tuple[int, ...]
WRAPPED, SUBCLASS = "torch._tensor._rebuild_from_type_v2", "torch._utils._rebuild_wrapper_subclass"
DTENSOR, MESH = "torch.distributed.tensor", "torch.distributed"
DTENSORS = (f"{DTENSOR}.DTensor", f"{DTENSOR}.api.DTensor", f"{DTENSOR}._api.DTensor")
BYTES, ENCODE = ("__builtin__.bytes", "builtins.bytes"), "_codecs.encode"
ALLOWED = OF_TENSORS | frozenset([
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
class StoredTensor:
    """A tensor in a zip: its elements are at an offset of the file, in steps of `stride` elements a dim."""

    dtype: str
    shape: Ints
    stride: Ints
    offset: int
    end: int  # of its storage

    @property
    def is_row_major(self) -> bool:
        """Whether its elements are one after the other."""
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size > 1 and step != expected:
                return False
            expected *= size
        return True


def read_tensor(storage: Storage, key: str, offset: int, length: int) -> StoredTensor:
    """Return where a tensor is in the zip at bytes [offset, offset + length) of a file; CheckFailed if it is not."""
    where = f"{storage.url}/{key} at byte {offset:,}"
    with checked(f"{where} is not a tensor as torch.save writes it"):
        archive = TorchZip(storage, key, offset, length, where)
        described = archive.described(OF_TENSORS)
        while isinstance(described, Record) and described.name == PARAMETER:
            described = described.args[0]
        if not isinstance(described, Record) or described.name not in REBUILDS:
            raise UserError(f"{where} is of a kind of tensor that is not read: {shown(described)}")
        return archive.placed(described)


class TorchZip:
    """The zip at some bytes of a file: its pickled description, and where its storages are."""

    def __init__(self, storage: Storage, key: str, offset: int, length: int, where: str) -> None:
        self._where, self._window = where, _Window(storage, key, offset, length)
        self._archive = zipfile.ZipFile(self._window)
        self._records = {info.filename.partition("/")[2]: info for info in self._archive.infolist()}
        self._begins: dict[str, int] = {}
        if "byteorder" in self._records and self._read("byteorder") != b"little":
            raise UserError(f"{where} is of a machine of another byte order")

    def described(self, allowed: Collection[str]) -> Any:
        """Return what the description says, parsed without running anything."""
        return parsed(self._read("data.pkl"), allowed, self._where, external=_Storage)

    def locate(self) -> None:
        """Find where all storages are by one request."""
        infos = {name: info for name, info in self._records.items() if name.startswith("data/")}
        heads = self._window.ranges([(info.header_offset, info.header_offset + 30) for info in infos.values()])
        self._begins = {name: _begin(info, head) for (name, info), head in zip(infos.items(), heads, strict=True)}

    def placed(self, described: Record) -> StoredTensor:
        """Return where the elements of a tensor of the description are; ValueError if there they cannot be."""
        storage, first, shape, stride = described.args[:4]
        kind, name, numel = storage.kind, f"data/{storage.key}", storage.numel
        dtype = described.args[6].removeprefix("torch.") if kind == UNTYPED else _OF_STORAGE[kind]
        size, record = ITEMSIZES[dtype], self._stored(name)
        begin = self._begins.get(name)
        if begin is None:
            self._window.seek(record.header_offset)
            begin = _begin(record, self._window.read(30))
        num_bytes = numel if kind == UNTYPED else numel * size
        shape, stride = (tuple(map(_checked, each)) for each in (shape, stride))
        reach = 0 if 0 in shape else first + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1
        if (
            record.file_size != num_bytes
            or begin + num_bytes > self._window.length
            or max(reach, math.prod(shape)) * size > num_bytes
        ):
            raise ValueError(f"a storage of {record.file_size:,} bytes for {dtype} {list(shape)}")
        at = self._window.offset + begin
        return StoredTensor(dtype, shape, stride, at + _checked(first) * size, at + num_bytes)

    def _read(self, name: str) -> bytes:
        record = self._stored(name)
        if record.file_size > MAX_RECORD_BYTES:
            raise ValueError(f"{name} of {record.file_size:,} bytes")
        return self._archive.read(record)

    def _stored(self, name: str) -> zipfile.ZipInfo:
        """Return a record that is stored as it is: a few bytes of a compressed one may be any number of opcodes."""
        record = self._records[name]
        if record.compress_type != zipfile.ZIP_STORED:
            raise UserError(f"{self._where} is compressed", hint="save it without compression")
        return record


def _begin(record: zipfile.ZipInfo, head: bytes) -> int:
    """Return where a record's data begins, given the first 30 bytes of its own header."""
    name_length, extra_length = struct.unpack("<HH", head[26:30])
    return int(record.header_offset + 30 + name_length + extra_length)


class _Storage:
    """A storage that the description refers to: ('storage', kind, key, location, number of elements)."""

    def __init__(self, pid: Any) -> None:
        word, kind, key, _, numel = pid
        if word != "storage" or type(kind) is not Name or not isinstance(key, str):
            raise ValueError(f"{shown(pid)} is not a storage")
        self.kind, self.key, self.numel = str(kind), key, _checked(numel)


class _Window(io.RawIOBase):
    """Bytes [offset, offset + length) of a file, of which the first and the last are read at once."""

    def __init__(self, storage: Storage, key: str, offset: int, length: int) -> None:
        self._storage, self._key, self.offset, self.length, self._at = storage, key, offset, length, 0
        ends = [(0, min(WINDOW_BYTES, length)), (max(length - WINDOW_BYTES, 0), length)]
        if length <= 2 * WINDOW_BYTES:
            ends = [(0, length)]
        self._known = [(a, data) for (a, _), data in zip(ends, self.ranges(ends), strict=True)]

    def ranges(self, ranges: list[tuple[int, int]]) -> list[bytes]:
        """Return some ranges of the bytes, read together."""
        found = self._storage.read_ranges(self._key, [(self.offset + a, self.offset + b) for a, b in ranges])
        return [bytes(data) for data in found]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, at: int, whence: int = 0) -> int:
        self._at = max(at + (0, self._at, self.length)[whence], 0)
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        stop = self.length if size is None or size < 0 else min(self._at + size, self.length)
        start, self._at = self._at, max(stop, self._at)
        if start >= stop:
            return b""
        for begin, data in self._known:
            if begin <= start and stop <= begin + len(data):
                return data[start - begin : stop - begin]
        return self.ranges([(start, stop)])[0]


def _checked(number: Any) -> int:
    if type(number) is not int or not 0 <= number < 1 << 62:
        raise ValueError(f"{shown(number)} is not a size")
    return number


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
