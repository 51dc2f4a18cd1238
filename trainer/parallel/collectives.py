"""Differentiable collectives of tensor parallelism, named by what happens to an activation.

`copy_to` and `reduce_from` are f and g of Megatron-LM (Shoeybi et al., 2019, arXiv 1909.08053); `gather_from` and
`reduce_scatter_to` take their places if tokens are cut (Korthikanti et al., 2022, arXiv 2205.05198).
"""

from typing import Any

import torch
from torch import Tensor

from trainer.mesh.group import Group


def copy_to(x: Tensor, group: Group) -> Tensor:
    """Hand a replicated activation to weights cut over the group: identity forward, gradients summed backward.

    The backward overwrites the gradient that it is handed.
    """
    return _CopyTo.apply(x, group) if group.size > 1 else x


def reduce_from(x: Tensor, group: Group) -> Tensor:
    """Sum partial results over the group forward, which overwrites them; identity backward."""
    return _ReduceFrom.apply(x, group) if group.size > 1 else x


def gather_from(x_TD: Tensor, group: Group) -> Tensor:
    """Return the tokens of all ranks of the group; backward each takes the sum of its tokens' gradients.

    The backward overwrites the gradient that it is handed.
    """
    return _GatherFrom.apply(x_TD, group)


def reduce_scatter_to(x_TD: Tensor, group: Group) -> Tensor:
    """Sum partial results over the group, which overwrites them, and return this rank's tokens; backward gathers."""
    return _ReduceScatterTo.apply(x_TD, group)


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_reduce(dx.contiguous()), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return group.all_reduce(x.detach().contiguous())

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return dx, None


class _GatherFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.start_gather(x_TD).wait()

    @staticmethod
    def backward(ctx: Any, dx_TD: Tensor) -> tuple[Tensor, None]:
        return ctx.group.reduce_scatter(dx_TD.contiguous()), None


class _ReduceScatterTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.reduce_scatter(x_TD.contiguous())

    @staticmethod
    def backward(ctx: Any, dx_TD: Tensor) -> tuple[Tensor, None]:
        return ctx.group.start_gather(dx_TD).wait(), None
