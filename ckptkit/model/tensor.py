"""TensorInfo: one row of a checkpoint's tensor table, in global terms."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ckptkit.model.placement import Placement
from threefold.errors import UserError, listed

# safetensors' dtype names -> bytes an element
ITEMSIZE = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip

# bounds of a tensor table, checked before anything is allocated by it
MAX_DIMS, MAX_NAME_BYTES, MAX_NUMEL, MAX_LAYERS = 8, 255, 1 << 48, 1 << 20


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Name, dtype (safetensors' names), true global shape and placement of one logical tensor."""

    name: str  # global, such as layers.17.attn.q.weight
    dtype: str  # as in safetensors: F32, BF16, I64
    shape: tuple[int, ...]  # of the whole tensor, without padding
    placement: Placement  # which ranks hold which part

    @property
    def numel(self) -> int:
        """Return the elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Return the bytes of the whole tensor."""
        return self.numel * ITEMSIZE[self.dtype]


def tensor_table(tensors: Sequence[TensorInfo]) -> dict[str, TensorInfo]:
    """Return a checkpoint's tensors by name; UserError where one is listed twice."""
    table = {info.name: info for info in tensors}
    if len(table) < len(tensors):
        counts = Counter(info.name for info in tensors)
        raise UserError(f"listed twice in a tensor table:{listed([n for n, count in counts.items() if count > 1])}")
    return table


def storage_order(tensor: TensorInfo) -> tuple[object, ...]:
    """Sort key of the order in which every writer stores tensors and every stream over a checkpoint visits them.

    Wide dtypes first (elements stay aligned without gaps), then by stage, then a parameter beside its optimizer state.
    Because all writers agree, a pass over the tensors reads each data file from its begin to its end, once.
    """
    stage = tensor.placement.stage
    layer = {"first": -1, "last": MAX_LAYERS}[stage] if isinstance(stage, str) else stage
    kind, _, parameter = tensor.name.rpartition("/")
    words = tuple([(int(word), "") if word.isdecimal() else (-1, word) for word in parameter.split(".")])
    return -ITEMSIZE[tensor.dtype], layer, words, kind
