"""Headers of safetensors files that others wrote: where each tensor is in the file, with every claim checked.

8 bytes of header length, a JSON header, then the tensors back to back: no gap, no overlap, nothing after. A header is
refused before anything is allocated by it.
"""

import json
import math
import struct
from dataclasses import dataclass
from typing import Any

from ckptkit.foreign.checks import checked, shown, size_of
from ckptkit.model.tensor import ITEMSIZE, MAX_DIMS, MAX_NAME_BYTES, MAX_NUMEL
from threefold.errors import CheckFailed, UserError
from threefold.storage import Storage

MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class ForeignTensor:
    """One tensor of a file: its bytes are [offset, offset + size_bytes) of the file."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size_bytes(self) -> int:
        """The bytes of all elements."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


def read_file(storage: Storage, key: str, start: int = 0) -> tuple[dict[str, ForeignTensor], int, dict[str, str]]:
    """Return the tensors that a file holds from byte `start` on, the file's size, and what is said beside them.

    CheckFailed if the file is missing, cut short or contradicts itself; UserError for a dtype that is not known.
    """
    where, size, begin = f"{storage.url}/{key}", size_of(storage, key), start + 8
    length = struct.unpack("<Q", storage.read_ranges(key, [(start, begin)])[0])[0] if size >= begin else 0
    if not 2 <= length <= min(size - begin, MAX_HEADER_BYTES):
        raise CheckFailed(f"{where} is not a safetensors file, or was cut short ({size:,} bytes)")
    text = bytes(storage.read_ranges(key, [(begin, begin + length)])[0])
    with checked(f"{where} has no sound safetensors header"):
        document = json.loads(text, object_pairs_hook=_without_doubles)
        metadata = document.pop("__metadata__", None) or {}
        if not isinstance(metadata, dict) or not all(isinstance(each, str) for each in metadata.values()):
            raise ValueError("__metadata__ is not of texts")
        tensors = [_tensor(where, name, key, row, begin + length) for name, row in document.items()]
    end = begin + length
    for tensor in sorted(tensors, key=lambda each: (each.offset, each.size_bytes)):
        if tensor.offset != end:
            fault = "overlaps the one before" if tensor.offset < end else "leaves a gap before it"
            raise CheckFailed(f"{where}: tensor {tensor.name} {fault} (byte {tensor.offset:,}, not {end:,})")
        end += tensor.size_bytes
    if end != size:
        raise CheckFailed(f"{where} has {size:,} bytes, its header says {end:,}", hint="fetch the file again")
    return {tensor.name: tensor for tensor in tensors}, size, metadata


def _tensor(where: str, name: str, key: str, row: dict[str, Any], data_offset: int) -> ForeignTensor:
    dtype, shape, (start, stop) = row["dtype"], row["shape"], row["data_offsets"]
    if not 0 < len(name.encode()) <= MAX_NAME_BYTES:
        raise ValueError(f"a tensor name of {len(name.encode())} bytes")
    if dtype not in ITEMSIZE:
        raise UserError(f"{where}: tensor {name} has dtype {shown(dtype)}, known are {', '.join(ITEMSIZE)}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMS:
        raise ValueError(f"{name}: shape {shown(shape)}")
    for number in (*shape, start, stop):
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 1 << 62:
            raise ValueError(f"{name}: {shown(number)} in its shape or offsets")
    size = math.prod(shape) * ITEMSIZE[dtype]
    if math.prod(shape) > MAX_NUMEL or stop - start != size:
        raise ValueError(f"{name}: {stop - start:,} bytes for {dtype} {shape}")
    return ForeignTensor(name, key, dtype, tuple(shape), data_offset + start)


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found
