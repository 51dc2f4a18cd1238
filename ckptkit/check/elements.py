"""Elements: the bytes of tensors as numbers that numpy calculates with, whatever their dtype, and back.

No value is rounded on the way there. Floats become float64 and integers int64. numpy knows neither bfloat16 nor float8:
their bits are moved to where a wider float has them, or looked up in a table. NaN payloads stay, up to the quiet bit
that conversions of float16 set.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.io.blocks import Bytes
from ckptkit.model.tensor import ITEMSIZE

BLOCK_ELEMENTS = 1 << 15  # whose float64 values, and some of what is derived from them, stay in a core's cache
INTEGERS = ("I64", "I32", "I16", "I8", "U8", "BOOL")
Floats = npt.NDArray[np.float64]
Numbers = npt.NDArray[Any]  # float64, or int64 of integers

_NUMPY = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8, "BOOL": np.uint8,
}  # fmt: skip
# from these on a finite value becomes infinite
_TOO_LARGE = {"F64": np.inf, "F32": 2.0**128 - 2.0**103, "BF16": 2.0**128 - 2.0**119, "F16": 65520.0}
_LEAST_SQUARES, _MOST_SQUARES = 1e-280, 1e280  # sums in which no square that matters over- or underflowed


def _float8_e4m3() -> Floats:
    """Return the values of all bytes: a sign, 4 bits of exponent (bias 7), 3 of mantissa, no infinity, one NaN."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    magnitude[byte & 127 == 127] = np.nan
    return np.copysign(magnitude, np.where(byte < 128, 1.0, -1.0))


_FLOAT8_E4M3 = _float8_e4m3()


def widened(data: Bytes, dtype: str) -> Numbers:
    """Return the elements that bytes hold: as int64 if the dtype is one of INTEGERS, else as float64."""
    match dtype:
        case "BF16":
            return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        case "F8_E5M2":
            return (data.astype(np.uint16) << 8).view(np.float16).astype(np.float64)
        case "F8_E4M3":
            return _FLOAT8_E4M3[data]
        case _:
            return data.view(_NUMPY[dtype]).astype(np.int64 if dtype in INTEGERS else np.float64)


def narrowed(values: Floats, dtype: str) -> Bytes:
    """Return float64 values as the bytes of F64, F32, F16 or BF16, rounded to the nearest, ties to even.

    OverflowError if a finite value is beyond the dtype.
    """
    if (np.isfinite(values) & (np.abs(values) >= _TOO_LARGE[dtype])).any():
        raise OverflowError(f"a value is beyond {dtype}")
    if dtype != "BF16":
        return np.ascontiguousarray(values.astype(_NUMPY[dtype])).view(np.uint8)
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16).view(np.uint8)


def bits(data: Bytes, dtype: str) -> npt.NDArray[Any]:
    """Return the bits of each element as an unsigned integer; nothing is copied."""
    return data.view(f"u{ITEMSIZE[dtype]}")


def l2_norm(values: Floats) -> float:
    """Return the square root of the sum of squares, also where the squares themselves are beyond a float's range."""
    squares = _squares(values)
    if _LEAST_SQUARES < squares < _MOST_SQUARES:
        return math.sqrt(squares)
    largest = float(np.abs(values).max(initial=0.0))
    if largest == 0 or not math.isfinite(largest):
        return largest
    return largest * math.sqrt(_squares(values / largest))


def _squares(values: Floats) -> float:
    """Return the sum of squares; without BLAS, whose threads would wait for each other in threads of ours."""
    return float(np.einsum("i,i->", values, values))


def json_number(value: float | None) -> float | str | None:
    """Return a number as JSON holds it: what JSON has no number for as the text "nan", "inf" or "-inf"."""
    return value if value is None or math.isfinite(value) else str(value)
