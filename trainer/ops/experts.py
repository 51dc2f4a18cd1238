"""Rows of tokens by expert: sorted, weighted inside the nonlinearity, and added up again for each token.

Token t goes to K experts, for each of which it has a row, number t K + k. Rows are taken in the order of their experts,
those of one expert in the order of numbers. For example tokens 0 and 1 with experts [2, 0] and [0, 1]: rows 1, 2, 3, 0,
of which 2 are of expert 0 and one each of experts 1 and 2. Sums have a fixed order, and all shapes are known
beforehand: nothing waits for a count. The weight of an expert is multiplied in before the last product, whose result is
then not needed in the backward.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.ops.dtypes import wide_dtype


def sort_rows(experts_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the numbers of rows in the order of their experts, [R], and how many each expert has, [E]; both int64."""
    sorted_R, rows_R = experts_TK.flatten().sort(stable=True)
    numbers_E = torch.arange(num_experts, dtype=sorted_R.dtype, device=sorted_R.device)
    ends_E = torch.searchsorted(sorted_R, numbers_E, right=True)
    return rows_R, ends_E.diff(prepend=ends_E.new_zeros(1))


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
    """Return the sum of each token's rows, [T, D]: those of its first expert first, in the wide dtype."""
    places_R = torch.empty_like(rows_R).scatter_(0, rows_R, torch.arange(len(rows_R), device=rows_R.device))
    out_TD = torch.zeros(num_tokens, y_RD.shape[1], dtype=wide_dtype(y_RD.dtype), device=y_RD.device)
    for places_T in places_R.view(num_tokens, k).unbind(1):
        out_TD += y_RD.index_select(0, places_T)
    return out_TD.to(y_RD.dtype)
