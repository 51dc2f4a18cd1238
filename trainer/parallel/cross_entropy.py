"""Cross-entropy over a vocabulary that is cut over a tensor-parallel group, its gradient in the logits' memory."""

from typing import Any

import torch
from torch import Tensor

from trainer.mesh.group import Group
from trainer.ops.cross_entropy import VocabularyPart, has_dense_rows, row_sums, write_gradient


def vocab_cross_entropy(
    logits_TV: Tensor, labels_T: Tensor, *, first_row: int, num_true_rows: int, group: Group, z_loss: float = 0.0,
    form: str = "csrc",
) -> Tensor:  # fmt: skip
    """Return -log softmax(logits)[label] of each token, in float32 or wider, the same on every rank of the group.

    With a z_loss that factor times the square of the log of the softmax's denominator is added. logits_TV holds this
    rank's rows [first_row, first_row + V) of the vocabulary; columns from `num_true_rows` on are padding, which takes
    no part. The backward overwrites the logits with their gradient, so it may run once; without it they stay.
    """
    return _VocabCrossEntropy.apply(logits_TV, labels_T, VocabularyPart(first_row, num_true_rows, form), group, z_loss)


class _VocabCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TV: Tensor, labels_T: Tensor, part: VocabularyPart, group: Group, z_loss: float
    ) -> Tensor:
        logits_TV = logits_TV if has_dense_rows(logits_TV) else logits_TV.contiguous()
        labels_T = labels_T.contiguous()
        sums_3T = joint(row_sums(logits_TV, labels_T, part), group)
        ctx.save_for_backward(logits_TV, labels_T, sums_3T)
        ctx.part, ctx.z_loss = part, z_loss
        return losses(sums_3T, z_loss)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dloss_T: Tensor) -> tuple[Tensor | None, ...]:
        logits_TV, labels_T, sums_3T = ctx.saved_tensors
        write_gradient(logits_TV, labels_T, ctx.part, factors(sums_3T, dloss_T, ctx.z_loss))
        torch.autograd.graph.increment_version(logits_TV)  # whoever saved the logits too gets an error
        return logits_TV.detach(), *[None] * 4


def joint(sums_3T: Tensor, group: Group) -> Tensor:
    """Return the `row_sums` of the whole vocabulary for those of the ranks' parts; two all-reduces.

    For example parts with the largest logits 1 and 3 and sums 1 and 1 join to 3 and 1 + exp(-2).
    """
    if group.size == 1:
        return sums_3T
    max_T = group.all_reduce(sums_3T[0].clone(), "max")
    packed_2T = sums_3T[1:].clone()  # the sum, which is brought to the joint maximum, and the label's logit
    packed_2T[0] *= (sums_3T[0] - max_T).exp()
    return torch.cat([max_T.unsqueeze(0), group.all_reduce(packed_2T)])


def losses(sums_3T: Tensor, z_loss: float) -> Tensor:
    """Return the loss of each row from the sums of the whole vocabulary."""
    max_T, sum_T, label_T = sums_3T
    log_T = sum_T.log()
    loss_T = log_T + (max_T - label_T)
    return loss_T + z_loss * (log_T + max_T).square() if z_loss else loss_T


def factors(sums_3T: Tensor, dloss_T: Tensor, z_loss: float) -> Tensor:
    """Return what `write_gradient` takes if the loss of each row has the gradient dloss.

    For the loss log S + M - x + z (log S + M)^2 a logit y has the gradient exp(y - M) / S * (1 + 2 z (log S + M)), less
    1 at the label.
    """
    max_T, sum_T, _ = sums_3T
    scale_T = dloss_T / sum_T
    if z_loss:
        scale_T = scale_T * (1 + 2 * z_loss * (sum_T.log() + max_T))
    return torch.stack([max_T, scale_T, dloss_T])
