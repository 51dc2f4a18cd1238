"""Random tensors of every dtype, and their elements as Python numbers, decoded here a second time, one by one."""

import struct

import numpy as np
from hypothesis import strategies as st

from ckptkit.model.layout import ParallelLayout
from ckptkit.model.tensor import ITEMSIZE, Cut, Placement, TensorInfo

NUMPY = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16, "I64": np.int64, "I32": np.int32,
    "I16": np.int16, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_, "F8_E4M3": np.uint8, "F8_E5M2": np.uint8,
}  # fmt: skip
SIGNED = {"I64", "I32", "I16", "I8"}
LAYERS = 2
layouts = st.builds(ParallelLayout, tp=st.integers(1, 3), dp=st.integers(1, 3), pp=st.integers(1, 2))


def random_array(dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Elements of any bits: NaN, Inf, subnormals and zeros of both signs among them."""
    random = np.random.default_rng(seed)
    data = random.integers(0, 256, (int(np.prod(shape)), ITEMSIZE[dtype]), np.uint8)
    data[random.random(len(data)) < 0.2] = 0
    data[random.random(len(data)) < 0.1] = 255
    if dtype == "BOOL":
        data &= 1
    return data.reshape(-1).view(NUMPY[dtype]).reshape(shape)


def exact(array: np.ndarray, dtype: str) -> list[int | float]:
    """The elements of an array, in row-major order."""
    data, size = np.ascontiguousarray(array).tobytes(), ITEMSIZE[dtype]
    return [number(data[at : at + size], dtype) for at in range(0, len(data), size)]


def number(data: bytes, dtype: str) -> int | float:
    """What the bytes of one element mean."""
    if dtype in ("F64", "F32", "F16"):
        return float(struct.unpack({"F64": "<d", "F32": "<f", "F16": "<e"}[dtype], data)[0])
    if dtype == "BF16":
        return float(struct.unpack("<f", b"\0\0" + data)[0])
    if dtype == "F8_E5M2":
        return float(struct.unpack("<e", b"\0" + data)[0])
    if dtype == "F8_E4M3":
        sign, exponent, mantissa = -1.0 if data[0] >> 7 else 1.0, data[0] >> 3 & 15, data[0] & 7
        if data[0] & 127 == 127:
            return float("nan")
        return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))
    return int.from_bytes(data, "little", signed=dtype in SIGNED)


@st.composite
def tables(draw: st.DrawFn) -> list[TensorInfo]:
    """Up to five tensors of any dtype, shape and cut; of no element and of no dim too."""
    infos = []
    for number_ in range(draw(st.integers(1, 5))):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        cuts = (Cut(draw(st.integers(0, len(shape) - 1))),) if shape and draw(st.booleans()) else ()
        stage = draw(st.sampled_from(["first", "last", 0, 1]))
        placement = Placement(stage, cuts, round_to=1 if cuts else None)
        infos.append(TensorInfo(f"t{number_}", draw(st.sampled_from(sorted(NUMPY))), shape, placement))
    return infos
