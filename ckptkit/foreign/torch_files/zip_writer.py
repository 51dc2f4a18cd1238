"""What `torch.save` makes of one tensor, laid out without torch: the bytes around its elements."""

import struct
import zlib
from dataclasses import dataclass
from typing import Any

from ckptkit.foreign.torch_files.archive import ITEMSIZES, STORAGES, Ints
from ckptkit.foreign.torch_files.pickle_writer import Call, External, Global, pickled


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
