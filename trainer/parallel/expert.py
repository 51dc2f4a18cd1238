"""The tokens of experts: brought to the ranks that have a part of each expert, and summed when they come back.

Each rank of the tensor-parallel group has some of the columns of every expert, so it multiplies the rows of all tokens
of the group, [S], which are gathered if tokens are cut. What the ranks return are partial sums. The way back of either
transfer is the other one: gradients of inputs are summed, those of results are gathered.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trainer.linear.grouped import GroupedGemm
from trainer.ops.experts import NATIVE, ExpertRows
from trainer.parallel.tensor import TensorParallel


@dataclass(frozen=True, slots=True)
class ExpertParallel:
    """The ranks that work on the same tokens' experts: T tokens of this rank, S of all, K experts of a token."""

    tensor: TensorParallel
    ops: ExpertRows = NATIVE

    def in_form(self, form: str) -> "ExpertParallel":
        """Return the same with the ops of rows in another form."""
        return self if form == self.ops.form else replace(self, ops=ExpertRows(form))

    def gather(self, x_TC: Tensor) -> Tensor:
        """Return something of the tokens of all ranks, [S, C]; nothing travels if each rank has all tokens."""
        return self.tensor.group.start_gather(x_TC).wait() if self.tensor.cuts_tokens else x_TC

    def sum(self, x_SC: Tensor) -> Tensor:
        """Return the sum over ranks for this rank's tokens, [T, C]; the argument is overwritten."""
        group = self.tensor.group
        return group.start_scatter(x_SC).wait() if self.tensor.cuts_tokens else group.all_reduce(x_SC)

    def rows(self, experts_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
        """Return the numbers of all tokens' rows in the order of experts, and where those of each expert end."""
        rows_R, counts_E = self.ops.sort(self.gather(experts_TK), num_experts)
        return rows_R, counts_E.cumsum(0).int()

    def widen(self, x_TD: Tensor, up: GroupedGemm, rows_R: Tensor, ends_E: Tensor, k: int) -> Tensor:
        """Return the packed gate|up of rows, [R, 2 F]; kept for the backward are x and numbers of rows."""
        assert x_TD.requires_grad or not torch.is_grad_enabled(), f"the input of {up.weight.name} requires no gradient"
        return _Widen.apply(x_TD, self, up, rows_R, ends_E, k)

    def narrow(
        self, packed_R2F: Tensor, weights_TK: Tensor, down: GroupedGemm, rows_R: Tensor, ends_E: Tensor
    ) -> Tensor:
        """Return what a token's experts return, [T, D], added up by weights; kept for the backward are the inputs."""
        return _Narrow.apply(packed_R2F, weights_TK, self, down, rows_R, ends_E)


class _Widen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, experts: ExpertParallel, up: GroupedGemm, rows_R: Tensor, ends_E: Tensor, k: int
    ) -> Tensor:
        ctx.save_for_backward(x_TD, rows_R, ends_E)
        ctx.experts, ctx.up, ctx.k, ctx.epoch = experts, up, k, up.weight.epoch
        return up.forward(experts.ops.gather(experts.gather(x_TD), rows_R, k), ends_E)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dpacked_R2F: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, rows_R, ends_E = ctx.saved_tensors
        experts, up, k = ctx.experts, ctx.up, ctx.k
        up.weight.check(ctx.epoch)
        x_SD = experts.gather(x_TD)
        dx_RD = up.dgrad(dpacked_R2F, ends_E)
        dx_TD = experts.sum(experts.ops.combine(dx_RD, rows_R, len(x_SD), k))
        up.wgrad(lambda: (dpacked_R2F, experts.ops.gather(x_SD, rows_R, k)), ends_E)
        return dx_TD, None, None, None, None, None


class _Narrow(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        packed_R2F: Tensor,
        weights_TK: Tensor,
        experts: ExpertParallel,
        down: GroupedGemm,
        rows_R: Tensor,
        ends_E: Tensor,
    ) -> Tensor:
        weights_SK = experts.gather(weights_TK)
        weights_R = weights_SK.flatten().index_select(0, rows_R)
        ctx.save_for_backward(packed_R2F, weights_R, rows_R, ends_E)
        ctx.experts, ctx.down, ctx.shape, ctx.epoch = experts, down, weights_SK.shape, down.weight.epoch
        y_RD = down.forward(experts.ops.weighted_swiglu(packed_R2F, weights_R), ends_E)
        return experts.sum(experts.ops.combine(y_RD, rows_R, *weights_SK.shape))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout_TD: Tensor) -> tuple[Tensor | None, ...]:
        packed_R2F, weights_R, rows_R, ends_E = ctx.saved_tensors
        experts, down, (_, k) = ctx.experts, ctx.down, ctx.shape
        down.weight.check(ctx.epoch)
        dout_SD = experts.gather(dout_TD.contiguous())
        dact_RF = down.dgrad(experts.ops.gather(dout_SD, rows_R, k), ends_E)
        dpacked_R2F, dweights_R, act_RF = experts.ops.weighted_swiglu_backward(dact_RF, packed_R2F, weights_R)
        down.wgrad(lambda: (experts.ops.gather(dout_SD, rows_R, k), act_RF), ends_E)
        dweights_SK = dweights_R.new_zeros(ctx.shape.numel()).scatter_(0, rows_R, dweights_R).view(ctx.shape)
        return dpacked_R2F, experts.sum(dweights_SK), None, None, None, None
