"""Linears cut by columns or rows over the tensor-parallel group.

Weights are [out, in]. A column-cut linear holds rows of the weight, which are some of the outputs; a row-cut one
columns, which are some of the inputs. For example a weight [8, 4] is [4, 4] on each of two ranks when cut by columns,
[8, 2] when cut by rows. Source: Megatron-LM (Shoeybi et al., 2019).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.linear.linear import MakeX, add_bias, linear
from trainer.linear.weight import Weight
from trainer.mesh.group import Group
from trainer.parallel.collectives import copy_to, reduce_from


def column_linear(x_TD: Tensor, weights: Sequence[tuple[Weight, Weight | None]], group: Group) -> Tensor:
    """Return this rank's outputs, [T, N / tp], of a replicated input: those of several weights side by side."""
    x_TD = copy_to(x_TD, group)
    parts = [linear(x_TD, weight, bias) for weight, bias in weights]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def row_linear(x_TK: Tensor, weight: Weight, bias: Weight | None, group: Group, make_x: MakeX | None = None) -> Tensor:
    """Return all outputs, [T, D], of this rank's inputs, the same on all ranks; the bias is added after the sum.

    `make_x` makes the inputs, as in `linear`.
    """
    if group.size == 1:
        return linear(x_TK, weight, bias, make_x=make_x)
    y_TD = reduce_from(linear(x_TK, weight, make_x=make_x), group)
    return y_TD if bias is None else add_bias(y_TD, bias)
