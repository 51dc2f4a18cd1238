"""Cross-entropy of a linear's outputs without the outputs: logits of some tokens at a time, and their gradient at once.

What the losses count for must be known in the forward, which hands the gradient of the matrix over and keeps that of
the input: the three products of an ordinary linear, and no logits between the two passes. Source: Liger Kernel (Hsu et
al., 2024, arXiv 2410.10989); here the matrix's gradient is summed in the wide dtype.
"""

from typing import Any

import torch
from torch import Tensor

from trainer.linear.weight import Weight
from trainer.mesh.group import Group
from trainer.ops.cross_entropy import VocabularyPart, row_sums, write_gradient
from trainer.ops.dtypes import wide_dtype
from trainer.parallel.cross_entropy import factors, joint, losses


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
    @torch.autograd.function.once_differentiable
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
            gemm.wgrad(logits, x)
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
