"""Differentiable collectives of tensor parallelism, named by what happens to an activation.

`copy_to` and `reduce_from` are f and g of Megatron-LM (Shoeybi et al., 2019, arXiv 1909.08053); `gather_from` and
`reduce_scatter_to` take their places if tokens are cut (Korthikanti et al., 2022, arXiv 2205.05198).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainer.mesh.group import Group
from trainer.ops.once import differentiable_once


def copy_to(x: Tensor, group: Group) -> Tensor:
    """Hand a replicated activation to weights cut over the group: identity forward, gradients summed backward.

    The backward overwrites the gradient that it is handed.
    """
    return _Pair.apply(x, _same, group.all_reduce) if group.size > 1 else x


def reduce_from(x: Tensor, group: Group) -> Tensor:
    """Sum partial results over the group forward, which overwrites them; identity backward."""
    return _Pair.apply(x, group.all_reduce, _same) if group.size > 1 else x


def gather_from(x_TD: Tensor, group: Group) -> Tensor:
    """Return the tokens of all ranks of the group; backward each takes the sum of its tokens' gradients.

    The backward overwrites the gradient that it is handed.
    """
    return _Pair.apply(x_TD, lambda x: group.start_gather(x).wait(), lambda dy: group.start_scatter(dy).wait())


def reduce_scatter_to(x_TD: Tensor, group: Group) -> Tensor:
    """Sum partial results over the group, which overwrites them, and return this rank's tokens; backward gathers."""
    return _Pair.apply(x_TD, lambda x: group.start_scatter(x).wait(), lambda dy: group.start_gather(dy).wait())


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


class _Pair(torch.autograd.Function):
    """A function of a dense tensor, and the one that makes its gradient of the result's."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.backward_of = backward
        return forward(x.detach().contiguous())

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return ctx.backward_of(dy.contiguous()), None, None
