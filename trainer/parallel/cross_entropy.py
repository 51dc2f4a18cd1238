"""Cross-entropy over a vocabulary that is cut over a tensor-parallel group."""

from typing import Any

import torch
from torch import Tensor

from trainer.mesh.group import Group


class _VocabCrossEntropy(torch.autograd.Function):
    """Keeps the softmax numerators for the backward; O(tokens * rows) memory, three small all-reduces."""

    @staticmethod
    def forward(
        ctx: Any, logits_TV: Tensor, labels_T: Tensor, first_row: int, num_true_rows: int, group: Group
    ) -> Tensor:
        wide = torch.float64 if logits_TV.dtype == torch.float64 else torch.float32
        exps_TV = logits_TV.to(wide, copy=True)
        exps_TV[:, num_true_rows:] = float("-inf")
        if num_true_rows:
            max_T = exps_TV.amax(-1)
        else:  # a rank may hold padding only
            max_T = torch.full_like(labels_T, float("-inf"), dtype=wide)
        group.all_reduce(max_T, "max")
        exps_TV.sub_(max_T.unsqueeze(-1))
        local_T = labels_T - first_row
        is_here_T = (local_T >= 0) & (local_T < num_true_rows)
        local_T = local_T.masked_fill(~is_here_T, 0)
        label_T = exps_TV.gather(-1, local_T.unsqueeze(-1)).squeeze(-1).masked_fill(~is_here_T, 0.0)
        group.all_reduce(label_T)
        exps_TV.exp_()
        sum_T = group.all_reduce(exps_TV.sum(-1))
        ctx.save_for_backward(exps_TV, sum_T, local_T, is_here_T)
        ctx.dtype = logits_TV.dtype
        return sum_T.log() - label_T

    @staticmethod
    def backward(ctx: Any, dloss_T: Tensor) -> tuple[Tensor, None, None, None, None]:
        exps_TV, sum_T, local_T, is_here_T = ctx.saved_tensors
        dlogits_TV = exps_TV.mul_((dloss_T / sum_T).unsqueeze(-1))  # the saved tensor is ours: reuse its memory
        rows_T = torch.arange(len(local_T), device=local_T.device)
        dlogits_TV[rows_T, local_T] -= dloss_T * is_here_T  # one element a row: no sum whose order could vary
        return dlogits_TV.to(ctx.dtype), None, None, None, None


def vocab_cross_entropy(
    logits_TV: Tensor, labels_T: Tensor, *, first_row: int, num_true_rows: int, group: Group
) -> Tensor:
    """-log softmax(logits)[label] of each token, in float32 or wider, the same on every rank of the group.

    logits_TV holds this rank's rows [first_row, first_row + V) of the vocabulary; columns from `num_true_rows` on are
    padding and take no part. Its backward may run once.
    """
    return _VocabCrossEntropy.apply(logits_TV, labels_T, first_row, num_true_rows, group)
