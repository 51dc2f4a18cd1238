"""Cross-entropy over a vocabulary that is cut over a tensor-parallel group."""

from typing import Any

import torch
from torch import Tensor

from trainer.mesh.group import Group
from trainer.ops.dtypes import wide_dtype


class _VocabCrossEntropy(torch.autograd.Function):
    """Keeps the log-softmax of this rank's rows for the backward; three small all-reduces join the parts.

    lse is the log of the sum of exponentials. With a rank's own lse the log-softmax over all ranks is its own plus a
    shift: own lse - joint lse. For example parts with lse 1.0 and 2.0 join to 2.313, with shifts -1.313 and -0.313.
    """

    @staticmethod
    def forward(
        ctx: Any, logits_TV: Tensor, labels_T: Tensor, first_row: int, num_true_rows: int, group: Group
    ) -> Tensor:
        wide = wide_dtype(logits_TV.dtype)
        logits_TV[:, num_true_rows:] = float("-inf")
        if num_true_rows:
            logp_TV = torch.log_softmax(logits_TV, -1, dtype=wide)
            lse_T = logits_TV[:, 0].to(wide) - logp_TV[:, 0]
        else:  # a rank may hold padding only
            logp_TV = torch.full_like(logits_TV, float("-inf"), dtype=wide)
            lse_T = torch.full_like(labels_T, float("-inf"), dtype=wide)
        shift_T = lse_T - _joint(lse_T, group)
        local_T = labels_T - first_row
        is_here_T = (local_T >= 0) & (local_T < num_true_rows)
        local_T = local_T.masked_fill(~is_here_T, 0)
        label_T = logp_TV.gather(-1, local_T.unsqueeze(-1)).squeeze(-1) + shift_T
        ctx.save_for_backward(logp_TV, shift_T if group.size > 1 else None, local_T, is_here_T)
        ctx.dtype = logits_TV.dtype
        return -group.all_reduce(label_T.masked_fill(~is_here_T, 0.0))

    @staticmethod
    def backward(ctx: Any, dloss_T: Tensor) -> tuple[Tensor, None, None, None, None]:
        logp_TV, shift_T, local_T, is_here_T = ctx.saved_tensors
        if shift_T is not None:
            logp_TV.add_(shift_T.unsqueeze(-1))
        dlogits_TV = logp_TV.exp_()  # the saved tensor is ours: reuse its memory
        rows_T = torch.arange(len(local_T), device=local_T.device)
        dlogits_TV[rows_T, local_T] -= is_here_T.to(dlogits_TV.dtype)  # one element a row: no sum that varies in order
        out_TV = dlogits_TV if ctx.dtype == dlogits_TV.dtype else torch.empty_like(dlogits_TV, dtype=ctx.dtype)
        return torch.mul(dlogits_TV, dloss_T.unsqueeze(-1), out=out_TV), None, None, None, None


def _joint(lse_T: Tensor, group: Group) -> Tensor:
    """Return the lse over all ranks of their own ones."""
    if group.size == 1:
        return lse_T
    max_T = group.all_reduce(lse_T.clone(), "max")
    return max_T + group.all_reduce((lse_T - max_T).exp()).log()


def vocab_cross_entropy(
    logits_TV: Tensor, labels_T: Tensor, *, first_row: int, num_true_rows: int, group: Group
) -> Tensor:
    """Return -log softmax(logits)[label] of each token, in float32 or wider, the same on every rank of the group.

    logits_TV holds this rank's rows [first_row, first_row + V) of the vocabulary; columns from `num_true_rows` on are
    padding, which is overwritten and takes no part. Its backward may run once.
    """
    return _VocabCrossEntropy.apply(logits_TV, labels_T, first_row, num_true_rows, group)
