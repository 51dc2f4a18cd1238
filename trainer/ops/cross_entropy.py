"""Cross-entropy over a part of a vocabulary: its sums in one read of the logits, its gradient in their memory.

Logits [T, V] are of 16, 32 or 64 bits; arithmetic and results are fp32, fp64 for fp64. For a row with the largest logit
M, S = sum of exp(logit - M) and the label's logit x, the loss is log S + M - x. Parts of a vocabulary are joined by the
largest M and by sums of S exp(M_part - M) and x: see `trainer.parallel.cross_entropy`. The bits of a row depend on the
row alone, on CUDA also on its address modulo 16; on the CPU they do not depend on the number of threads.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from threefold.errors import UserError
from trainer.ops import forms, native
from trainer.ops.dtypes import wide_dtype
from trainer.ops.soft_cap import blocks, slopes, soft_cap


class _Logits(ctypes.Structure):  # op_logits of csrc/ops/ops.h
    _fields_ = (
        ("values", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_cols", "row_stride", "num_true", "first_token")),
        ("labels", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """Which tokens the columns of logits are: `first_row` and the following ones; from `num_true_rows` on, padding.

    `form` is that of the ops on them. With a `cap` the logits that count are `trainer.ops.soft_cap` of these.

    For example of 10 tokens on two ranks, with 8 columns each, the second has first_row 8 and 2 true ones.
    """

    first_row: int
    num_true_rows: int
    form: str = "csrc"
    cap: float = 0.0


def row_sums(logits_TV: Tensor, labels_T: Tensor, part: VocabularyPart) -> Tensor:
    """Return the largest logit M of each row, the sum of exp(logit - M), and the label's logit: [3, T].

    The label's logit is 0 if another part has the label. The logits stay as they are, or become the capped ones;
    neighbouring columns must be neighbours in memory.
    """
    logits = _logits(logits_TV, labels_T, part)
    if part.cap:
        soft_cap(logits_TV, part.cap)
    if part.form != "csrc":
        return forms.forward(part.form, _row_sums, logits_TV, labels_T, part.first_row, part.num_true_rows)[0]
    sums_3T = logits_TV.new_empty(3, len(logits_TV), dtype=wide_dtype(logits_TV.dtype))
    native.call("cross_entropy_forward", logits_TV, ctypes.byref(logits), sums_3T.data_ptr())
    return sums_3T


def write_gradient(logits_TV: Tensor, labels_T: Tensor, part: VocabularyPart, factors_3T: Tensor) -> None:
    """Overwrite logits by exp(logit - M) * scale, less g at the label, for `factors` M, scale and g of each row.

    A row whose g is 0 becomes 0, whatever it held; so does padding. With a cap the logits are as `row_sums` left them.
    """
    if not part.cap:
        _write_gradient(logits_TV, labels_T, part, factors_3T)
        return
    for rows in blocks(logits_TV):
        slopes_TV = slopes(logits_TV[rows], part.cap)
        _write_gradient(logits_TV[rows], labels_T[rows], part, factors_3T[:, rows].contiguous())
        logits_TV[rows] *= slopes_TV


def _write_gradient(logits_TV: Tensor, labels_T: Tensor, part: VocabularyPart, factors_3T: Tensor) -> None:
    logits = _logits(logits_TV, labels_T, part)
    if part.form != "csrc":
        forms.forward(part.form, _plain_gradient, logits_TV, labels_T, part.first_row, part.num_true_rows, factors_3T)
        return
    native.call("cross_entropy_backward", logits_TV, ctypes.byref(logits), factors_3T.data_ptr())


def cross_entropy_reference(logits_TV: Tensor, labels_T: Tensor, z_loss: float = 0.0) -> Tensor:
    """Return the loss of each row over a whole vocabulary in plain torch, in the same precision."""
    wide_TV = logits_TV.to(wide_dtype(logits_TV.dtype))
    lse_T = wide_TV.logsumexp(-1)
    loss_T = lse_T - wide_TV.gather(-1, labels_T.unsqueeze(-1)).squeeze(-1)
    return loss_T + z_loss * lse_T.square() if z_loss else loss_T


def _row_sums(logits_TV: Tensor, labels_T: Tensor, first_row: int, num_true_rows: int) -> tuple[Tensor]:
    if not num_true_rows:  # all padding
        zeros_T = torch.zeros_like(labels_T, dtype=wide_dtype(logits_TV.dtype))
        return (torch.stack([zeros_T - torch.inf, zeros_T, zeros_T]),)
    wide_TV, columns_T = logits_TV[:, :num_true_rows].to(wide_dtype(logits_TV.dtype)), labels_T - first_row
    max_T = wide_TV.amax(1)
    sum_T = (wide_TV - max_T.unsqueeze(1)).exp().sum(1)
    label_T = wide_TV.gather(1, columns_T.clamp(0, num_true_rows - 1).unsqueeze(1)).squeeze(1)
    is_here_T = (columns_T >= 0) & (columns_T < num_true_rows)
    return (torch.stack([max_T, sum_T, torch.where(is_here_T, label_T, 0)]),)


def _plain_gradient(
    logits_TV: Tensor, labels_T: Tensor, first_row: int, num_true_rows: int, factors_3T: Tensor
) -> tuple[Tensor, ...]:
    max_T1, scale_T1, g_T1 = factors_3T.unsqueeze(-1)
    columns_V = torch.arange(logits_TV.shape[1], device=logits_TV.device)
    gradient_TV = (logits_TV.to(factors_3T.dtype) - max_T1).exp() * scale_T1
    gradient_TV = gradient_TV - torch.where(columns_V == (labels_T - first_row).unsqueeze(1), g_T1, 0)
    logits_TV.copy_(torch.where((g_T1 == 0) | (columns_V >= num_true_rows), 0, gradient_TV))
    return ()


def _logits(logits_TV: Tensor, labels_T: Tensor, part: VocabularyPart) -> _Logits:
    num_rows, num_cols = logits_TV.shape
    if labels_T.shape != (num_rows,) or labels_T.dtype != torch.int64 or not labels_T.is_contiguous():
        raise UserError(
            f"cross_entropy: labels are {labels_T.dtype} {list(labels_T.shape)}, strides {labels_T.stride()}, not "
            f"torch.int64 {[num_rows]}, one behind the other"
        )
    if labels_T.device != logits_TV.device:
        raise UserError(f"cross_entropy: labels are on {labels_T.device}, logits on {logits_TV.device}")
    if not has_dense_rows(logits_TV):
        raise UserError(f"cross_entropy: columns of logits must be neighbours; strides are {logits_TV.stride()}")
    values = logits_TV.data_ptr(), num_rows, num_cols, logits_TV.stride(0), part.num_true_rows, part.first_row
    return _Logits(*values, labels_T.data_ptr())


def has_dense_rows(logits_TV: Tensor) -> bool:
    """Return whether neighbouring columns are neighbours in memory, and rows do not overlap."""
    num_rows, num_cols = logits_TV.shape
    return (num_cols < 2 or logits_TV.stride(1) == 1) and (num_rows < 2 or logits_TV.stride(0) >= num_cols)
