"""Tensor parallelism: linears cut by columns or rows, the vocabulary-parallel embedding, and their collectives.

Weights are [out_features, in_features]. A column-cut linear holds rows of the weight (some outputs), a row-cut one
columns (some inputs). Source: Megatron-LM (Shoeybi et al., 2019).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.mesh.group import Group


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_reduce(dx.contiguous().clone()), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return group.all_reduce(x.contiguous().clone())

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return dx, None


def enter(x: Tensor, group: Group) -> Tensor:
    """Hand a replicated activation to cut weights: identity forward, gradients summed over the group backward."""
    return _Enter.apply(x, group) if group.size > 1 else x


def leave(x: Tensor, group: Group) -> Tensor:
    """Sum partial results over the group forward, identity backward."""
    return _Leave.apply(x, group) if group.size > 1 else x


class ColumnLinear(nn.Module):
    """The outputs on this rank of a linear; the input must have been through `enter`."""

    def __init__(self, num_in: int, num_out: int, *, bias: bool, group: Group) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_out // group.size, num_in))
        self.bias = nn.Parameter(torch.empty(num_out // group.size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out / tp]."""
        return F.linear(x, self.weight, self.bias)


class RowLinear(nn.Module):
    """A linear over this rank's inputs, summed over the group; the bias is added once, after the sum."""

    def __init__(self, num_in: int, num_out: int, *, bias: bool, group: Group) -> None:
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(torch.empty(num_out, num_in // group.size))
        self.bias = nn.Parameter(torch.empty(num_out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., in / tp] -> [..., out], the same on every rank of the group."""
        out = leave(F.linear(x, self.weight), self.group)
        return out if self.bias is None else out + self.bias


class VocabMatrix(nn.Module):
    """The rows on this rank of a [vocabulary, hidden] matrix, padded so that the group divides it."""

    def __init__(self, vocab_size: int, hidden_size: int, *, group: Group) -> None:
        super().__init__()
        self.group = group
        num_rows = -(-vocab_size // group.size)
        self.first_row = group.index * num_rows
        self.num_true_rows = max(min(vocab_size - self.first_row, num_rows), 0)
        self.weight = nn.Parameter(torch.empty(num_rows, hidden_size))

    def embed(self, tokens: Tensor) -> Tensor:
        """Return rows of the whole matrix: tokens [...] -> [..., hidden]."""
        if self.group.size == 1:
            return F.embedding(tokens, self.weight)
        local = tokens - self.first_row
        is_here = (local >= 0) & (local < self.num_true_rows)
        rows = F.embedding(local.masked_fill(~is_here, 0), self.weight)
        return leave(rows * is_here.unsqueeze(-1), self.group)

    def logits(self, x: Tensor) -> Tensor:
        """Return this rank's logits: x [..., hidden], through `enter` already -> [..., rows], padding rows included."""
        return F.linear(x, self.weight)
