"""The token embedding, whose rows are cut over the tensor-parallel group, and learned positions."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.linear.weight import Weight, add_or_write
from trainer.ops.dtypes import wide_dtype
from trainer.ops.once import differentiable_once
from trainer.parallel.tensor import TensorParallel


def anchor(device: torch.device) -> Tensor:
    """Return where the graph begins, which the gradients of all weights hang on: a number that nobody reads."""
    return torch.empty((), device=device, requires_grad=torch.is_grad_enabled())


def embed_tokens(tokens_S: Tensor, weight: Weight, tensor: TensorParallel, anchor: Tensor) -> Tensor:
    """Return the rows of the whole matrix that this rank's tokens of the micro-batch are, [T, D].

    For example with 10 rows on each of two ranks token 13 is row 3 of the second, and zero on the first.
    """
    if tensor.group.size == 1:
        return lookup(tokens_S, weight, anchor)
    num_rows = weight.shape[0]
    local_S = tokens_S - tensor.group.index * num_rows
    is_here_S = (local_S >= 0) & (local_S < num_rows)
    rows_SD = lookup(local_S.masked_fill(~is_here_S, 0), weight, anchor)
    return tensor.leave(rows_SD * is_here_S.unsqueeze(-1))


def lookup(rows_T: Tensor, weight: Weight, anchor: Tensor) -> Tensor:
    """Return rows of a matrix, [T, D]."""
    return _Lookup.apply(anchor, rows_T, weight)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, rows_T: Tensor, weight: Weight) -> Tensor:
        ctx.save_for_backward(rows_T)
        ctx.weight = weight
        return F.embedding(rows_T, weight.values)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[None, None, None]:
        (rows_T,) = ctx.saved_tensors
        weight: Weight = ctx.weight

        def add(out: Tensor, first: bool) -> None:
            wide_TD = dy_TD.to(wide_dtype(dy_TD.dtype))
            dweight = torch.ops.aten.embedding_dense_backward(wide_TD, rows_T, weight.shape[0], -1, False)
            add_or_write(dweight)(out, first)

        weight.add_gradient(add)
        return None, None, None
