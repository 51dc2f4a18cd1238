"""What `torch.save` makes of one tensor: a zip of uncompressed records, read and laid out without torch.

`archive/data.pkl` is the pickled description, `archive/data/0` the storage, little-endian. A file of
torch.distributed.checkpoint is such zips, one after the other.
"""

import io
import math
import struct
import zipfile
import zlib
from dataclasses import dataclass
from typing import Any

from ckptkit.foreign.pickle_writer import Call, External, Global, pickled
from ckptkit.foreign.restricted_pickle import Name, Record, parsed
from threefold.errors import CheckFailed, UserError
from threefold.storage import Storage

WINDOW_BYTES, MAX_RECORD_BYTES = 4096, 16 << 20
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
ALLOWED = frozenset([
    *_OF_STORAGE, UNTYPED, *REBUILDS, PARAMETER, "collections.OrderedDict", *(f"torch.{dtype}" for dtype in ITEMSIZES)
])  # fmt: skip
Ints = tuple[int, ...]


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
    window = _Window(storage, key, offset, length)
    try:
        archive = zipfile.ZipFile(window)
        records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        if any(records[name].file_size > MAX_RECORD_BYTES for name in ("data.pkl", "byteorder") if name in records):
            raise ValueError("a description of more than 16 MiB")
        if "byteorder" in records and archive.read(records["byteorder"]) != b"little":
            raise UserError(f"{where} is a tensor of a machine of another byte order")
        described = parsed(archive.read(records["data.pkl"]), ALLOWED, where, external=_Storage)
        while isinstance(described, Record) and described.name == PARAMETER:
            described = described.args[0]
        return _placed(described, records, window, where)
    except (UserError, CheckFailed):
        raise
    except (zipfile.BadZipFile, KeyError, IndexError, TypeError, ValueError, AttributeError, NotImplementedError,
            struct.error, EOFError, OverflowError, RuntimeError) as error:  # fmt: skip
        raise CheckFailed(f"{where} is not a tensor as torch.save writes it: {error!r}") from None


def _placed(described: Any, records: dict[str, zipfile.ZipInfo], window: "_Window", where: str) -> StoredTensor:
    if not isinstance(described, Record) or described.name not in REBUILDS:
        raise UserError(f"{where} is of a kind of tensor that is not read: {getattr(described, 'name', described)!r}")
    storage, first, shape, stride = described.args[:4]
    kind, key, numel = storage.kind, storage.key, storage.numel
    dtype = described.args[6].removeprefix("torch.") if kind == UNTYPED else _OF_STORAGE[kind]
    size = ITEMSIZES[dtype]
    record = records[f"data/{key}"]
    if record.compress_type != zipfile.ZIP_STORED:
        raise UserError(f"{where} is compressed", hint="save it without compression")
    window.seek(record.header_offset)
    head = window.read(30)
    begin = record.header_offset + 30 + sum(struct.unpack("<HH", head[26:30]))
    num_bytes = numel if kind == UNTYPED else numel * size
    shape, stride = (tuple(map(_checked, each)) for each in (shape, stride))
    reach = 0 if 0 in shape else first + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1
    if (
        record.file_size != num_bytes
        or begin + num_bytes > window.length
        or max(reach, math.prod(shape)) * size > num_bytes
    ):
        raise ValueError(f"a storage of {record.file_size:,} bytes for {dtype} {list(shape)}")
    at = window.offset + begin
    return StoredTensor(dtype, shape, stride, at + _checked(first) * size, at + num_bytes)


class _Storage:
    """A storage that the description refers to: ('storage', kind, key, location, number of elements)."""

    def __init__(self, pid: Any) -> None:
        word, kind, key, _, numel = pid
        if word != "storage" or type(kind) is not Name or not isinstance(key, str):
            raise ValueError(f"{pid!r} is not a storage")
        self.kind, self.key, self.numel = str(kind), key, _checked(numel)


class _Window(io.RawIOBase):
    """Bytes [offset, offset + length) of a file, of which the first and the last are read at once."""

    def __init__(self, storage: Storage, key: str, offset: int, length: int) -> None:
        self._storage, self._key, self.offset, self.length, self._at = storage, key, offset, length, 0
        ends = [(0, min(WINDOW_BYTES, length)), (max(length - WINDOW_BYTES, 0), length)]
        if length <= 2 * WINDOW_BYTES:
            ends = [(0, length)]
        found = storage.read_ranges(key, [(offset + a, offset + b) for a, b in ends])
        self._known = [(a, bytes(data)) for (a, _), data in zip(ends, found, strict=True)]

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
        return bytes(self._storage.read_ranges(self._key, [(self.offset + start, self.offset + stop)])[0])


def _checked(number: Any) -> int:
    if type(number) is not int or not 0 <= number < 1 << 62:
        raise ValueError(f"{number!r} is not a size")
    return number


@dataclass(frozen=True, slots=True)
class TensorZip:
    """The bytes around a tensor's own in a zip of its own: those before, and after given the CRC-32 of its own."""

    dtype: str
    shape: Ints
    num_bytes: int

    @property
    def head(self) -> bytes:
        """The bytes before the elements."""
        return b"".join(_local(name, data) + data for name, data in self._records()) + _local("data/0", None)

    def tail(self, crc: int) -> bytes:
        """Return the bytes after the elements."""
        after, at = _DESCRIPTOR.pack(0x08074B50, crc, self.num_bytes, self.num_bytes), 0
        central = b""
        for name, data in self._records():
            central += _central(name, zlib.crc32(data), len(data), at, flags=0)
            at += len(_local(name, data)) + len(data)
        central += _central("data/0", crc, self.num_bytes, at, flags=8)
        begin = at + len(_local("data/0", None)) + self.num_bytes + len(after)
        count = len(self._records()) + 1
        return after + central + _END.pack(0x06054B50, 0, 0, count, count, len(central), begin, 0)

    def _records(self) -> list[tuple[str, bytes]]:
        """Return the records before that of the elements."""
        stride, step = list[int](), 1
        for length in reversed(self.shape):
            stride.insert(0, step)
            step *= max(length, 1)
        hooks, size = Call(Global("collections", "OrderedDict")), ITEMSIZES[self.dtype]
        args: tuple[Any, ...] = (0, self.shape, tuple(stride), False, hooks)
        if self.dtype in STORAGES:
            kind, numel = Global("torch", f"{STORAGES[self.dtype]}Storage"), self.num_bytes // size
            function = "_rebuild_tensor_v2"
        else:
            kind, numel = Global("torch.storage", "UntypedStorage"), self.num_bytes
            function, args = "_rebuild_tensor_v3", (*args, Global("torch", self.dtype))
        stored = External(("storage", kind, "0", "cpu", numel))
        made = Call(Global("torch._utils", function), (stored, *args))
        return [("data.pkl", pickled(made)), ("byteorder", b"little"), ("version", b"3\n")]


_LOCAL, _CENTRAL = struct.Struct("<IHHHHHIIIHH"), struct.Struct("<IHHHHHHIIIHHHHHII")
_DESCRIPTOR, _END = struct.Struct("<IIII"), struct.Struct("<IHHHHIIH")
_NO_DATE = 0x21  # 1980-01-01


def _local(name: str, data: bytes | None) -> bytes:
    """Return the header before a record; without data its size and checksum follow it."""
    full, size = f"archive/{name}".encode(), 0 if data is None else len(data)
    crc, flags = (0, 8) if data is None else (zlib.crc32(data), 0)
    return _LOCAL.pack(0x04034B50, 20, flags, 0, 0, _NO_DATE, crc, size, size, len(full), 0) + full


def _central(name: str, crc: int, size: int, at: int, *, flags: int) -> bytes:
    """Return the entry of a record in the directory at the end."""
    full = f"archive/{name}".encode()
    return _CENTRAL.pack(
        0x02014B50, 20, 20, flags, 0, 0, _NO_DATE, crc, size, size, len(full), 0, 0, 0, 0, 0, at
    ) + full  # fmt: skip
