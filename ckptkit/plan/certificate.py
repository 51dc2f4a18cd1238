"""Certificate: a digest of each tensor that does not depend on how it is cut, made of sums that parts add up to. Pure.

It is an object in the root: `sums` names the kind of sums, `tensors` has a digest for each tensor that holds data:
XXH3-64, as 16 hex digits, of `name NUL dtype NUL shape NUL sum`, where shape is decimal numbers joined by commas and
sum 16 hex digits. So it changes if an element, the order of elements, a dtype, a shape or a name does.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeGuard

import numpy as np
import xxhash

from ckptkit.format.root import Root
from ckptkit.io.blocks import Columns
from ckptkit.model.chunk_table import Ints, TensorColumns
from ckptkit.model.tensor import TensorInfo
from threefold.errors import CheckFailed, listed

KIND = "crc64-nvme"
Certificate = Mapping[str, Any]


class TensorSums:
    """The sums of the tensors of a table, out of those of parts."""

    def __init__(self, tensors: Sequence[TensorInfo]) -> None:
        self._tensors = tensors
        self._values = np.zeros(len(tensors), np.uint64)
        self._is_complete = True

    def add(self, numbers: Ints, sums: Columns | None) -> None:
        """Add what a part holds of some tensors, by their numbers; None if nobody knows its sums."""
        if sums is None:
            self._is_complete = False
        else:
            np.bitwise_xor.at(self._values, numbers, sums)

    def certificate(self) -> Certificate | None:
        """Return the certificate of what was added, None if something has no sums."""
        if not self._is_complete:
            return None
        tensors = zip(self._tensors, self._values.tolist(), strict=True)
        digests = {info.name: digest(info, value) for info, value in tensors if info.placement.tied_to is None}
        return {"sums": KIND, "tensors": digests}


def digest(info: TensorInfo, value: int) -> str:
    """Return the digest of a tensor whose elements have a sum."""
    return xxhash.xxh3_64_hexdigest(f"{info.name}{_kind(info.dtype, info.shape)}{value:016x}".encode())


@lru_cache(1 << 14)
def _kind(dtype: str, shape: tuple[int, ...]) -> str:
    return f"\0{dtype}\0{','.join(map(str, shape))}\0"


def is_readable(certificate: Certificate | None) -> TypeGuard[Certificate]:
    """Return whether a root's certificate is one of these: a root may have none, or one that vouches in another way."""
    return certificate is not None and certificate.get("sums") == KIND and isinstance(certificate.get("tensors"), dict)


def differing(saved: Certificate, read: Certificate) -> list[str]:
    """Return the tensors that are not equal to what was saved, or are in one of two certificates only."""
    one, other = saved["tensors"], read["tensors"]
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def joined(
    root: Root, parts: Iterable[tuple[TensorColumns, Columns | None]], what: str
) -> tuple[Certificate | None, bool]:
    """Return the certificate of a step written again in parts, that of the save if it has one, and if both are equal.

    Each part has its sums, None if nobody knows them. CheckFailed names the tensors if `what` was written is not equal
    to what was saved.
    """
    tensors = list(root.tensors.values())
    sums, table = TensorSums(tensors), TensorColumns.of(tensors)
    for columns, values in parts:
        sums.add(np.array([table.numbers[name] for name in columns.names], np.int64), values)
    saved, written = root.certificate, sums.certificate()
    if not is_readable(saved) or written is None:
        return saved or written, False
    if wrong := differing(saved, written):
        text = f"{what} is not equal to what was saved, by the certificate of the save:{listed(wrong)}"
        raise CheckFailed(text, hint=f"memory or a program changed values; read another step than {root.step}")
    return saved, True
