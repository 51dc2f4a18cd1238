"""Cross-entropy over a vocabulary that is cut over a tensor-parallel group, its gradient in the logits' memory.

`linear_cross_entropy` makes the logits itself, of some tokens at a time, and their gradient at once. What the losses
count for must be known in its forward, which hands the gradient of the matrix over and keeps that of the input: the
three products of an ordinary linear, and no logits between the two passes. Source: Liger Kernel (Hsu et al., 2024,
arXiv 2410.10989); here the matrix's gradient is summed in the wide dtype.
"""

from typing import Any

import torch
from torch import Tensor

from trainer.linear.weight import Weight
from trainer.mesh.group import Group
from trainer.ops.cross_entropy import VocabularyPart, has_dense_rows, row_sums, write_gradient
from trainer.ops.dtypes import wide_dtype
from trainer.ops.once import differentiable_once


def vocab_cross_entropy(
    logits_TV: Tensor, labels_T: Tensor, part: VocabularyPart, group: Group, *, z_loss: float = 0.0
) -> Tensor:
    """Return -log softmax(logits)[label] of each token, in float32 or wider, the same on every rank of the group.

    With a z_loss that factor times the square of the log of the softmax's denominator is added. logits_TV holds this
    rank's `part` of the vocabulary. The backward overwrites the logits with their gradient, so it may run once; a cap
    overwrites them before.
    """
    return _VocabCrossEntropy.apply(logits_TV, labels_T, part, group, z_loss)


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
    @differentiable_once
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


def linear_cross_entropy(
    x_TD: Tensor, matrix: Weight, labels_T: Tensor, part: VocabularyPart, group: Group, *, weights_T: Tensor | None,
    z_loss: float, tokens_at_once: int,
) -> Tensor:  # fmt: skip
    """Return `vocab_cross_entropy` of x W^T for this rank's part of the vocabulary, [T].

    The sum of the losses times weights_T is what is differentiated: the backward takes weights_T for their gradient,
    whatever it is handed. Without weights nothing is differentiated.
    """
    options = labels_T.contiguous(), part, group, weights_T, z_loss, tokens_at_once
    if weights_T is None:
        return _losses(x_TD, matrix, *options)[0]
    assert x_TD.requires_grad, f"the input of {matrix.name} requires no gradient"
    return _LinearCrossEntropy.apply(x_TD, matrix, options)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, matrix: Weight, options: tuple[Any, ...]) -> Tensor:
        loss_T, dx_TD = _losses(x_TD, matrix, *options)
        ctx.save_for_backward(dx_TD)
        return loss_T

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dloss_T: Tensor) -> tuple[Tensor, None, None]:
        return ctx.saved_tensors[0], None, None


@torch.no_grad()
def _losses(
    x_TD: Tensor, matrix: Weight, labels_T: Tensor, part: VocabularyPart, group: Group, weights_T: Tensor | None,
    z_loss: float, tokens_at_once: int,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return the loss of each token and, with weights, the gradient of x; that of the matrix is handed over."""
    dx_TD = None if weights_T is None else torch.empty_like(x_TD)
    gemm, num_tokens = matrix.gemm, len(x_TD)
    logits_TV = x_TD.new_empty(min(tokens_at_once, num_tokens), matrix.shape[0])
    loss_T = x_TD.new_empty(num_tokens, dtype=wide_dtype(x_TD.dtype))
    for start in range(0, num_tokens, tokens_at_once):
        some = slice(start, start + tokens_at_once)
        x, labels = x_TD[some], labels_T[some]
        logits = gemm.forward(x, out=logits_TV[: len(x)])
        sums = joint(row_sums(logits, labels, part), group)
        loss_T[some] = losses(sums, z_loss)
        if dx_TD is not None and weights_T is not None:
            write_gradient(logits, labels, part, factors(sums, weights_T[some], z_loss))
            gemm.wgrad(logits, x, ends=some.stop >= num_tokens)
            gemm.dgrad(logits, out=dx_TD[some])
    return loss_T, dx_TD


def tokens_at_once(num_tokens: int, token_bytes: int, max_bytes: float) -> int:
    """Return how many tokens' logits are made at once: equal parts of at most `max_bytes`, multiples of 128 if large.

    For example 32,768 tokens of 256 KiB and at most 1 GiB make 8 parts of 4,096. No bound makes one part.
    """
    if not max_bytes or num_tokens * token_bytes <= max_bytes:
        return num_tokens
    most = max(int(max_bytes // token_bytes), 1)
    if most >= 128:
        most = most // 128 * 128
    num_parts = -(-num_tokens // most)
    even = -(-num_tokens // num_parts)
    return min(-(-even // 128) * 128, most) if most >= 128 else even
