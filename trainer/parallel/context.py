"""Context parallel: each row's tokens are cut over ranks, and attention sees all of them.

Between the heads and attention each rank hands the others what they compute: it has all heads of some tokens before,
some heads of all tokens after, and the other way round behind attention (Jacobs et al., 2023, arXiv 2309.14509). So any
backend and any mask is the same as on one rank. For example 8 tokens of 4 heads on two ranks: rank 1 has heads 0-3 of
tokens 4-7, and attends with heads 2 and 3 of tokens 0-7.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.mesh.group import Group
from trainer.ops.attention.seam import Backend, Gradients, Mask, attention
from trainer.ops.dtypes import wide_dtype


@dataclass(frozen=True, slots=True)
class ContextParallel:
    """The group over which each row's tokens are cut: T below are this rank's tokens, S those of all ranks."""

    group: Group

    def attend(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, mask: Mask, backend: Backend, results: list[Tensor] | None
    ) -> Tensor:
        """Return `attention` of this rank's tokens [T, N, H], under a mask of all of them; `results` as there."""
        if self.group.size == 1:
            return attention(q_TNH, k_TKH, v_TKH, mask, backend, results)
        q_SNH, k_SKH, v_SKH = _ToHeads.apply(q_TNH, k_TKH, v_TKH, self.group)
        return _ToTokens.apply(attention(q_SNH, k_SKH, v_SKH, mask, backend, results), self.group)


class _ToHeads(torch.autograd.Function):
    """All heads of some tokens become some heads of all tokens, by one exchange of q, k and v packed."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Group) -> Gradients:
        ctx.group, ctx.shapes = group, [x.shape for x in (q, k, v)]
        counts = [-(-x.shape[1] // group.size) for x in (q, k, v)]  # of a rank; fewer heads than ranks are repeated
        packed_RTCH = q.new_empty(group.size, len(q), sum(counts), q.shape[2])
        for part_RTCH, x in zip(packed_RTCH.split(counts, 2), (q, k, v), strict=True):
            part_RTCH.copy_(_by_rank(x, group.size))
        q, k, v = group.start_exchange(packed_RTCH).wait().flatten(0, 1).split(counts, 1)
        return q, k, v

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        counts = [x.shape[1] for x in grads]
        received = ctx.group.start_exchange(torch.cat(grads, 1)).wait()  # tokens of one rank after the other
        parts = received.unflatten(0, (ctx.group.size, -1)).split(counts, 2)
        dq, dk, dv = (_by_token(part, shape) for part, shape in zip(parts, ctx.shapes, strict=True))
        return dq, dk, dv, None


class _ToTokens(torch.autograd.Function):
    """Some heads of all tokens become all heads of some tokens."""

    @staticmethod
    def forward(ctx: Any, x_SNH: Tensor, group: Group) -> Tensor:
        ctx.group = group
        received_RTNH = group.start_exchange(x_SNH.contiguous()).wait().unflatten(0, (group.size, -1))
        return received_RTNH.transpose(0, 1).flatten(1, 2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy_TNH: Tensor) -> tuple[Tensor, None]:
        packed_RTNH = _by_rank(dy_TNH, ctx.group.size).contiguous()
        return ctx.group.start_exchange(packed_RTNH).wait().flatten(0, 1), None


def _by_rank(x_TNH: Tensor, num_ranks: int) -> Tensor:
    """Return a view [R, T, N / R, H] of what each rank gets; of fewer heads than ranks, neighbours get the same."""
    repeats = max(num_ranks // x_TNH.shape[1], 1)
    parts_TRNH = x_TNH.unflatten(1, (num_ranks // repeats, -1)).transpose(0, 1)
    return parts_TRNH if repeats == 1 else parts_TRNH.repeat_interleave(repeats, 0)


def _by_token(x_RTNH: Tensor, shape: torch.Size) -> Tensor:
    """Return the gradient [T, N, H] of `_by_rank`; what several ranks have of one head is added in the wide dtype."""
    repeats = len(x_RTNH) * x_RTNH.shape[2] // shape[1]
    if repeats > 1:
        x_RTNH = x_RTNH.unflatten(0, (-1, repeats)).sum(1, dtype=wide_dtype(x_RTNH.dtype)).to(x_RTNH.dtype)
    return x_RTNH.transpose(0, 1).flatten(1, 2)
