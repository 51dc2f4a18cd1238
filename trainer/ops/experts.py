"""Rows of tokens by expert: sorted, weighted inside the nonlinearity, and added up again for each token.

Token t goes to K experts, for each of which it has a row, number t K + k. Rows are taken in the order of their experts,
those of one expert in the order of numbers. For example tokens 0 and 1 with experts [2, 0] and [0, 1]: rows 1, 2, 3, 0,
of which 2 are of expert 0 and one each of experts 1 and 2. Sums have a fixed order, and all shapes are known
beforehand: nothing waits for a count. The weight of an expert is multiplied in before the last product, whose result is
then not needed in the backward.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from threefold.errors import UserError
from trainer.ops import native
from trainer.ops.dtypes import wide_dtype


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """The ops of this file in one form: csrc, the native kernels, or torch, the functions below.

    Orders and sums of rows have the same bits in both, and on CPU and CUDA. `used` is how many of the first rows are of
    tokens, an int32 on the device, or None for all: those behind are padding, whose results mean nothing.
    """

    form: str = "csrc"

    def sort(self, experts_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
        """Return what `sort_rows` does."""
        if self.form != "csrc":
            return sort_rows(experts_TK, num_experts)
        experts_TK = experts_TK.contiguous()
        rows_R, counts_E = experts_TK.new_empty(experts_TK.numel()), experts_TK.new_empty(num_experts)
        partials = experts_TK.new_empty(native.partials("sort_rows", experts_TK, len(rows_R)) * num_experts)
        sizes, results = (len(rows_R), num_experts), (rows_R, counts_E, partials)
        native.call("sort_rows", experts_TK, experts_TK.data_ptr(), *sizes, *map(native.pointer, results))
        return rows_R, counts_E

    def gather(self, x_TD: Tensor, rows_R: Tensor, k: int, used: Tensor | None = None) -> Tensor:
        """Return what `gather_rows` does."""
        if self.form != "csrc":
            return gather_rows(x_TD, rows_R, k)
        x_TD = x_TD.contiguous()
        out_RD = x_TD.new_empty(len(rows_R), x_TD.shape[1])
        native.call("gather_rows", x_TD, *map(native.pointer, (x_TD, rows_R, used, out_RD)), *out_RD.shape, k)
        return out_RD

    def weighted_swiglu(self, packed_R2F: Tensor, weights_R: Tensor, used: Tensor | None = None) -> Tensor:
        """Return what `weighted_swiglu` does."""
        if self.form != "csrc":
            return weighted_swiglu(packed_R2F, weights_R)
        act_RF = packed_R2F.new_empty(len(packed_R2F), _columns(packed_R2F, weights_R))
        tensors = (packed_R2F, weights_R, used, act_RF)
        native.call("weighted_swiglu_forward", packed_R2F, *map(native.pointer, tensors), *act_RF.shape)
        return act_RF

    def weighted_swiglu_backward(
        self, dact_RF: Tensor, packed_R2F: Tensor, weights_R: Tensor, used: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what `weighted_swiglu_backward` does; as csrc in the memory of the packed rows and of `dact`."""
        if self.form != "csrc":
            return weighted_swiglu_backward(dact_RF, packed_R2F, weights_R)
        dact_RF, dweights_R = dact_RF.contiguous(), torch.empty_like(weights_R)
        num_columns = _columns(packed_R2F, weights_R)
        tensors = (dact_RF, packed_R2F, weights_R, used, packed_R2F, dweights_R, dact_RF)
        sizes = (len(packed_R2F), num_columns)
        native.call("weighted_swiglu_backward", packed_R2F, *map(native.pointer, tensors), *sizes)
        return packed_R2F, dweights_R, dact_RF

    def combine(self, y_RD: Tensor, rows_R: Tensor, num_tokens: int, k: int, used: Tensor | None = None) -> Tensor:
        """Return what `combine` does."""
        if self.form != "csrc":
            return combine(y_RD, rows_R, num_tokens, k)
        y_RD = y_RD.contiguous()
        out_TD, places_TK = y_RD.new_empty(num_tokens, y_RD.shape[1]), rows_R.new_empty(num_tokens * k)
        tensors = (y_RD, rows_R, used, places_TK, out_TD)
        native.call("combine_rows", y_RD, *map(native.pointer, tensors), len(rows_R), *out_TD.shape, k)
        return out_TD


NATIVE = ExpertRows()


def _columns(packed_R2F: Tensor, weights_R: Tensor) -> int:
    """Return F; UserError for rows that are not dense, or weights of another number or dtype than theirs."""
    is_dense = packed_R2F.dim() == 2 and packed_R2F.shape[1] % 2 == 0 and packed_R2F.is_contiguous()
    is_weight = weights_R.shape == packed_R2F.shape[:1] and weights_R.dtype == wide_dtype(packed_R2F.dtype)
    if not is_dense or not is_weight or not weights_R.is_contiguous():
        packed = f"packed {list(packed_R2F.shape)} with strides {list(packed_R2F.stride())}"
        weights = f"weights {list(weights_R.shape)} of {weights_R.dtype}"
        raise UserError(
            f"weighted_swiglu: {packed}, {weights}: rows must be dense, with a weight each in the wide dtype"
        )
    return packed_R2F.shape[1] // 2


def sort_rows(experts_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the numbers of rows in the order of their experts, [R], and how many each expert has, [E]; both int64."""
    sorted_R, rows_R = experts_TK.flatten().sort(stable=True)
    numbers_E = torch.arange(num_experts, dtype=sorted_R.dtype, device=sorted_R.device)
    ends_E = torch.searchsorted(sorted_R, numbers_E, right=True)
    return rows_R, ends_E.diff(prepend=ends_E.new_zeros(1))


def gather_rows(x_TD: Tensor, rows_R: Tensor, k: int) -> Tensor:
    """Return the tokens of rows, [R, D]; padding, of number T K, has what the last token has."""
    return x_TD.index_select(0, rows_R.clamp(max=len(x_TD) * k - 1) // k)


def weighted_swiglu(packed_R2F: Tensor, weights_R: Tensor) -> Tensor:
    """Return silu(gate) * up * weight of packed rows [gate | up], [R, F]; weights have the wide dtype."""
    gate_RF, up_RF = packed_R2F.to(weights_R.dtype).chunk(2, 1)
    return (F.silu(gate_RF) * up_RF * weights_R.unsqueeze(1)).to(packed_R2F.dtype)


def weighted_swiglu_backward(dact_RF: Tensor, packed_R2F: Tensor, weights_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of packed rows and of weights, and the product again."""
    gate_RF, up_RF = packed_R2F.to(weights_R.dtype).chunk(2, 1)
    wide_RF, share_RF = dact_RF.to(weights_R.dtype), torch.sigmoid(gate_RF)
    silu_RF = gate_RF * share_RF
    dweights_R = (wide_RF * silu_RF * up_RF).sum(1)
    wide_RF = wide_RF * weights_R.unsqueeze(1)
    dgate_RF = wide_RF * up_RF * (share_RF + silu_RF * (1 - share_RF))
    dpacked_R2F = torch.cat([dgate_RF, wide_RF * silu_RF], 1).to(packed_R2F.dtype)
    return dpacked_R2F, dweights_R, (silu_RF * up_RF * weights_R.unsqueeze(1)).to(packed_R2F.dtype)


def combine(y_RD: Tensor, rows_R: Tensor, num_tokens: int, k: int) -> Tensor:
    """Return the sum of each token's rows, [T, D]: those of its first expert first, in the wide dtype.

    Rows that are not there count as zeros: a rank of ep has some, and padding of number T K.
    """
    places_R = rows_R.new_full((num_tokens * k + 1,), -1)
    places_R.scatter_(0, rows_R, torch.arange(len(rows_R), device=rows_R.device))
    out_TD = torch.zeros(num_tokens, y_RD.shape[1], dtype=wide_dtype(y_RD.dtype), device=y_RD.device)
    for places_T in places_R[:-1].view(num_tokens, k).unbind(1):
        rows_TD = y_RD.index_select(0, places_T.clamp(min=0))
        out_TD += rows_TD.masked_fill((places_T < 0).unsqueeze(1), 0)
    return out_TD.to(y_RD.dtype)
