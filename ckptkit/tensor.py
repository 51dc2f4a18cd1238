"""TensorInfo: one row of a checkpoint's tensor table, in global terms."""

from dataclasses import dataclass

from ckptkit.placement import Placement

# safetensors' dtype names -> bytes an element
ITEMSIZE = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Name, dtype (safetensors' names), true global shape and placement of one logical tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    placement: Placement
