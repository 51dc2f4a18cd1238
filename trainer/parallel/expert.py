"""The products of experts, and what brings them the rows of tokens and takes back what they return.

The ranks of ep have some of the experts each, E of them. tp cuts each expert by its width, and gathers tokens if they
are cut; or with etp 1 its ranks are ranks of ep. What a rank of tp returns are partial sums.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from trainer.linear.grouped import GroupedGemm
from trainer.mesh.group import Group
from trainer.ops.experts import NATIVE, ExpertRows
from trainer.parallel.dispatch import Dispatch, Exchanged, Gathered, Routes, TokenGroups
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

    def routes(self, experts_TK: Tensor, num_experts: int) -> Routes:
        """Return the way of rows; behind numbers of rows are the ends of those of each of this rank's experts."""
        return self.dispatch.routes(experts_TK, num_experts, self.ops)

    def widen(self, x_TD: Tensor, up: GroupedGemm, routes: Routes, k: int) -> Tensor:
        """Return the packed gate|up of rows, [R, 2 F]; kept for the backward are x and routes."""
        assert x_TD.requires_grad or not torch.is_grad_enabled(), f"the input of {up.weight.name} requires no gradient"
        return _Widen.apply(x_TD, self, up, k, *routes)

    def narrow(self, packed_R2F: Tensor, weights_TK: Tensor, down: GroupedGemm, routes: Routes) -> Tensor:
        """Return what a token's experts return, [T, D], added up by weights; kept for the backward are the inputs."""
        return _Narrow.apply(packed_R2F, weights_TK, self, down, *routes)


class _Widen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, experts: ExpertParallel, up: GroupedGemm, k: int, *routes: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, *routes)
        ctx.experts, ctx.up, ctx.k, ctx.epoch = experts, up, k, up.weight.epoch
        return up.forward(experts.dispatch.bring(x_TD, routes, k, experts.ops)(), routes[1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dpacked_R2F: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, *saved = ctx.saved_tensors
        routes = tuple(saved)
        experts, up, k = ctx.experts, ctx.up, ctx.k
        dispatch, ops, ends_E = experts.dispatch, experts.ops, routes[1]
        up.weight.check(ctx.epoch)
        x_rows = dispatch.bring(x_TD, routes, k, ops)
        dx_TD = dispatch.send_back(up.dgrad(dpacked_R2F, ends_E), routes, len(x_TD), k, ops)
        up.wgrad(lambda: (dpacked_R2F, x_rows()), ends_E)
        return dx_TD, None, None, None, *(None for _ in routes)


class _Narrow(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, packed_R2F: Tensor, weights_TK: Tensor, experts: ExpertParallel, down: GroupedGemm, *routes: Tensor
    ) -> Tensor:
        dispatch, ops = experts.dispatch, experts.ops
        weights_R = dispatch.bring_weights(weights_TK, routes)
        ctx.save_for_backward(packed_R2F, weights_R, *routes)
        ctx.experts, ctx.down, ctx.shape, ctx.epoch = experts, down, weights_TK.shape, down.weight.epoch
        y_RD = down.forward(ops.weighted_swiglu(packed_R2F, weights_R, dispatch.used(routes)), routes[1])
        num_tokens, k = weights_TK.shape
        return dispatch.send_back(y_RD, routes, num_tokens, k, ops)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout_TD: Tensor) -> tuple[Tensor | None, ...]:
        packed_R2F, weights_R, *saved = ctx.saved_tensors
        routes = tuple(saved)
        experts, down = ctx.experts, ctx.down
        dispatch, ops, ends_E = experts.dispatch, experts.ops, routes[1]
        down.weight.check(ctx.epoch)
        dout_rows = dispatch.bring(dout_TD.contiguous(), routes, ctx.shape[1], ops)
        dact_RF, used = down.dgrad(dout_rows(), ends_E), dispatch.used(routes)
        dpacked_R2F, dweights_R, act_RF = ops.weighted_swiglu_backward(dact_RF, packed_R2F, weights_R, used)
        down.wgrad(lambda: (dout_rows(), act_RF), ends_E)
        dweights_TK = dispatch.send_weights_back(dweights_R, routes, ctx.shape)
        return dpacked_R2F, dweights_TK, None, None, *(None for _ in routes)
