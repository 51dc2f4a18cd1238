"""Differentiable collectives of tensor parallelism, named by what happens to an activation.

`copy_to` and `reduce_from` are f and g of Megatron-LM (Shoeybi et al., 2019, arXiv 1909.08053).
"""

from typing import Any

import torch
from torch import Tensor

from trainer.mesh.group import Group


def copy_to(x: Tensor, group: Group) -> Tensor:
    """Hand a replicated activation to weights cut over the group: identity forward, gradients summed backward."""
    return _CopyTo.apply(x, group) if group.size > 1 else x


def reduce_from(x: Tensor, group: Group) -> Tensor:
    """Sum partial results over the group forward, identity backward."""
    return _ReduceFrom.apply(x, group) if group.size > 1 else x


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_reduce(dx.contiguous().clone()), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return group.all_reduce(x.contiguous().clone())

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return dx, None
