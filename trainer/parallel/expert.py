"""The products of experts, and what brings them the rows of tokens and takes back what they return.

The ranks of ep have some of the experts each, E of them. tp cuts each expert by its width, and gathers tokens if they
are cut; or with etp 1 its ranks are ranks of ep. What a rank of tp returns are partial sums.

Tokens may come in parts, and those of one travel beside the products of the part before. In the backward gradients of
weights are made beside sums that travel, and tokens gathered again beside the product that does not read them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor

from trainer.linear.grouped import GroupedGemm
from trainer.mesh.group import Group
from trainer.ops.experts import NATIVE, ExpertRows
from trainer.ops.once import differentiable_once
from trainer.parallel.dispatch import Coming, Dispatch, Exchanged, Gathered, Routes, TokenGroups
from trainer.parallel.rows import RowLimit
from trainer.parallel.tensor import TensorParallel


@dataclass(frozen=True, slots=True)
class ExpertParallel:
    """The experts of T tokens of this rank, K of a token, whose R rows come by a dispatch."""

    dispatch: Dispatch
    ops: ExpertRows = NATIVE

    @classmethod
    def of(
        cls,
        tensor: TensorParallel,
        ep: Group,
        limit: RowLimit,
        how: Literal["allgather", "alltoall"],
        *,
        borrows_tp: bool,
    ) -> "ExpertParallel":
        """Return the ranks that work on the same tokens' experts; those of tp cut an expert, unless ep borrows them."""
        of_tp = (tensor.group,) if tensor.cuts_tokens and not borrows_tp else ()
        if how == "alltoall" and ep.size > 1:
            return cls(Exchanged(TokenGroups(tensor, of_tp), ep, limit))
        return cls(Gathered(TokenGroups(tensor, (*of_tp, *((ep,) if ep.size > 1 else ()))), ep, limit))

    def in_form(self, form: str) -> "ExpertParallel":
        """Return the same with the ops of rows in another form."""
        return self if form == self.ops.form else replace(self, ops=ExpertRows(form))

    def begin(self, x_TD: Tensor, num_parts: int) -> list[Coming]:
        """Begin to send parts of tokens, as far as that needs no routes."""
        return [self.dispatch.begin(part_TD) for part_TD in x_TD.detach().tensor_split(num_parts)]

    def routes(self, experts_TK: Tensor, num_experts: int, num_parts: int) -> list[Routes]:
        """Return the way of the rows of each part of tokens.

        Behind numbers of rows are the ends of those of each of this rank's experts.
        """
        parts_TK = experts_TK.tensor_split(num_parts)
        return [self.dispatch.routes(part_TK, num_experts, self.ops) for part_TK in parts_TK]

    def widen(
        self, x_TD: Tensor, coming: Sequence[Coming], up: GroupedGemm, routes: Sequence[Routes], k: int
    ) -> tuple[Tensor, ...]:
        """Return the packed gate|up of the rows of each part of tokens, [R, 2 F], which `coming` brings.

        Kept for the backward are x and routes.
        """
        assert x_TD.requires_grad or not torch.is_grad_enabled(), f"the input of {up.weight.name} requires no gradient"
        packed: tuple[Tensor, ...] = _Widen.apply(x_TD, self, up, k, coming, *chain(*routes))
        return packed

    def narrow(
        self, packed: Sequence[Tensor], weights_TK: Tensor, down: GroupedGemm, routes: Sequence[Tensor]
    ) -> Tensor:
        """Return what a token's experts return, [T, D], added up by weights; `routes` are those of all parts of tokens.

        Kept for the backward are the inputs.
        """
        return _Narrow.apply(weights_TK, self, down, len(packed), *packed, *routes)

    def by_part(self, routes: Sequence[Tensor]) -> list[Routes]:
        """Return the routes of each part of tokens."""
        size = self.dispatch.num_routes
        return [tuple(routes[start : start + size]) for start in range(0, len(routes), size)]

    def bring(self, coming: Sequence[Coming], routes: Sequence[Routes], k: int) -> list[Coming]:
        """Go on sending parts of tokens; what is coming are their rows."""
        return [self.dispatch.bring(tokens, way, k, self.ops) for tokens, way in zip(coming, routes, strict=True)]


class _Widen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        experts: ExpertParallel,
        up: GroupedGemm,
        k: int,
        coming: Sequence[Coming],
        *routes: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x_TD, *routes)
        ctx.experts, ctx.up, ctx.k, ctx.epoch = experts, up, k, up.weight.epoch
        ways = experts.by_part(routes)
        rows = experts.bring(coming, ways, k)
        return tuple(up.forward(x_rows(), way[1]) for x_rows, way in zip(rows, ways, strict=True))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *dpacked: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, *routes = ctx.saved_tensors
        experts, up, k = ctx.experts, ctx.up, ctx.k
        up.weight.check(ctx.epoch)
        ways, num_tokens = experts.by_part(routes), [len(part_TD) for part_TD in x_TD.tensor_split(len(dpacked))]
        sums = []
        rows = experts.bring(experts.begin(x_TD, len(dpacked)), ways, k)
        for x_rows, way, count, dpacked_R2F in zip(rows, ways, num_tokens, dpacked, strict=True):
            sums.append(experts.dispatch.send_back(up.dgrad(dpacked_R2F, way[1]), way, count, k, experts.ops))
            up.wgrad(lambda dy=dpacked_R2F, x=x_rows: (dy, x()), way[1], ends=way is ways[-1])  # beside the sums
        return joined(sums), None, None, None, None, *(None for _ in routes)


class _Narrow(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weights_TK: Tensor, experts: ExpertParallel, down: GroupedGemm, num_parts: int, *others: Tensor
    ) -> Tensor:
        dispatch, ops, k = experts.dispatch, experts.ops, weights_TK.shape[1]
        packed, routes = others[:num_parts], others[num_parts:]
        parts, ways = weights_TK.tensor_split(num_parts), experts.by_part(routes)
        weights = [dispatch.bring_weights(part_TK, way) for part_TK, way in zip(parts, ways, strict=True)]
        ctx.save_for_backward(*packed, *weights, *routes)
        ctx.experts, ctx.down, ctx.shapes, ctx.epoch = experts, down, [part.shape for part in parts], down.weight.epoch
        sums = []
        for packed_R2F, weights_R, way, (num_tokens, _) in zip(packed, weights, ways, ctx.shapes, strict=True):
            act_RF = ops.weighted_swiglu(packed_R2F, weights_R, dispatch.used(way))
            sums.append(dispatch.send_back(down.forward(act_RF, way[1]), way, num_tokens, k, ops))
        return joined(sums)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dout_TD: Tensor) -> tuple[Tensor | None, ...]:
        experts, down, count = ctx.experts, ctx.down, len(ctx.shapes)
        saved = ctx.saved_tensors
        packed, weights, routes = saved[:count], saved[count : 2 * count], saved[2 * count :]
        dispatch, ways = experts.dispatch, experts.by_part(routes)
        down.weight.check(ctx.epoch)
        dpacked, dweights = [], []
        rows = experts.bring(experts.begin(dout_TD.contiguous(), count), ways, ctx.shapes[0][1])
        for dout_rows, packed_R2F, weights_R, way, shape in zip(rows, packed, weights, ways, ctx.shapes, strict=True):
            dact_RF, used = down.dgrad(dout_rows(), way[1]), dispatch.used(way)
            dpacked_R2F, dweights_R, act_RF = experts.ops.weighted_swiglu_backward(dact_RF, packed_R2F, weights_R, used)
            down.wgrad(lambda dy=dout_rows, act=act_RF: (dy(), act), way[1], ends=way is ways[-1])
            dweights.append(dispatch.send_weights_back(dweights_R, way, shape))
            dpacked.append(dpacked_R2F)
        return torch.cat(dweights), None, None, None, *dpacked, *(None for _ in routes)


def joined(parts: Sequence[Coming]) -> Tensor:
    """Return what comes of parts of tokens as that of all."""
    first, *others = (part() for part in parts)
    return torch.cat([first, *others]) if others else first
