"""Linears cut by columns or rows over the tensor-parallel group.

Weights are [out, in]. A column-cut linear holds rows of the weight, which are some of the outputs; a row-cut one
columns, which are some of the inputs. For example a weight [8, 4] is [4, 4] on each of two ranks when cut by columns,
[8, 2] when cut by rows. Source: Megatron-LM (Shoeybi et al., 2019). Sequence parallel cuts the tokens of what is
between a row-cut linear and the next column-cut one, of which each rank then keeps and computes its share: all-reduces
become reduce-scatters and all-gathers (Korthikanti et al., 2022, arXiv 2205.05198).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.linear.linear import MakeX, add_bias, linear
from trainer.linear.overlapped import TokenCut
from trainer.linear.weight import Weight
from trainer.mesh.group import Group
from trainer.parallel.collectives import copy_to, gather_from, reduce_from, reduce_scatter_to
from trainer.parallel.places import Runs, share_of


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """The group over which linears are cut, and whether tokens are too: then T below is S / tp of S tokens.

    These are transferred in `num_parts()` beside the products of cut linears, or with 1 before or after them.
    """

    group: Group
    cuts_tokens: bool
    num_parts: Callable[[], int] = lambda: 1

    def enter(self, x_TD: Tensor) -> Tensor:
        """Return the input of cut weights, [S, D], from an activation that is replicated, or cut by tokens."""
        return gather_from(x_TD, self.group) if self.cuts_tokens else copy_to(x_TD, self.group)

    def leave(self, x_SD: Tensor) -> Tensor:
        """Return the sum of the ranks' partial results, [T, D]; if tokens are cut the argument is overwritten."""
        return reduce_scatter_to(x_SD, self.group) if self.cuts_tokens else reduce_from(x_SD, self.group)

    def own_runs(self, runs: Runs) -> Runs | None:
        """Return which places of these this rank has of an activation whose tokens are cut."""
        return share_of(runs, self.group.index, self.group.size) if self.cuts_tokens else None

    def column_linear(self, x_TD: Tensor, weights: Sequence[tuple[Weight, Weight | None]]) -> Tensor:
        """Return this rank's outputs, [S, N / tp]: those of several weights side by side."""
        if self.cuts_tokens:
            gather = TokenCut(self.group, self.num_parts())
            parts = [linear(x_TD, weight, bias, gather=gather) for weight, bias in weights]
        else:
            x_TD = copy_to(x_TD, self.group)
            parts = [linear(x_TD, weight, bias) for weight, bias in weights]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def row_linear(self, x_SK: Tensor, weight: Weight, bias: Weight | None, make_x: MakeX | None = None) -> Tensor:
        """Return all outputs, [T, D], of this rank's inputs; the bias is added after the sum.

        `make_x` makes the inputs, as in `linear`.
        """
        if self.group.size == 1:
            return linear(x_SK, weight, bias, make_x=make_x)
        if self.cuts_tokens:
            y_TD = linear(x_SK, weight, make_x=make_x, scatter=TokenCut(self.group, self.num_parts()))
        else:
            y_TD = self.leave(linear(x_SK, weight, make_x=make_x))
        return y_TD if bias is None else add_bias(y_TD, bias)
