"""The tokens of experts: brought to the ranks that have a part of them, and summed when they come back.

The ranks of ep have some of the experts each, E of them, and gather the tokens of all, of which each multiplies those
that go to its own. So shapes are known beforehand and no host waits. tp cuts each expert by its width, and gathers
tokens too if they are cut; or with etp 1 its ranks are ranks of ep. What a rank returns are partial sums. The way back
of either transfer is the other one: gradients of inputs are summed, those of results are gathered.

For example 2 ranks of ep with 4 tokens each, 2 experts a token, of 4: rank 1 has experts 2 and 3, gathers 8 tokens with
16 rows, of which about half are its own, and has memory for some more than half. A step in which they are more changes
nothing, and is repeated with more.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.linear.grouped import GroupedGemm
from trainer.mesh.group import Group
from trainer.ops.experts import NATIVE, ExpertRows
from trainer.parallel.rows import RowLimit
from trainer.parallel.tensor import TensorParallel


@dataclass(frozen=True, slots=True)
class ExpertParallel:
    """The ranks that work on the same tokens' experts: T tokens of this rank, S of all, K experts of a token.

    Each has E of the experts. Those of tp cut an expert by its width, unless ep borrows them.
    """

    tensor: TensorParallel
    ep: Group
    limit: RowLimit
    borrows_tp: bool = False
    ops: ExpertRows = NATIVE

    def in_form(self, form: str) -> "ExpertParallel":
        """Return the same with the ops of rows in another form."""
        return self if form == self.ops.form else replace(self, ops=ExpertRows(form))

    @property
    def _gathered(self) -> list[Group]:
        """Return the groups over which tokens are gathered, in order."""
        is_cut = self.tensor.cuts_tokens and not self.borrows_tp
        return [*([self.tensor.group] if is_cut else []), *([self.ep] if self.ep.size > 1 else [])]

    def gather(self, x_TC: Tensor) -> Tensor:
        """Return something of the tokens of all ranks, [S, C]; nothing travels if each rank has all tokens."""
        for group in self._gathered:
            x_TC = group.start_gather(x_TC).wait()
        return x_TC

    def sum(self, x_SC: Tensor) -> Tensor:
        """Return the sum over ranks for this rank's tokens, [T, C]; the argument is overwritten."""
        for group in reversed(self._gathered):
            x_SC = group.start_scatter(x_SC).wait()
        return x_SC if self.tensor.cuts_tokens else self.tensor.group.all_reduce(x_SC)

    def rows(self, experts_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
        """Return the numbers of this rank's rows in the order of its experts, and where those of each expert end.

        Behind them is padding, with the number that is one more than all rows.
        """
        experts_SK = self.gather(experts_TK)
        if self.ep.size == 1:
            rows_R, counts_E = self.ops.sort(experts_SK, num_experts)
            return rows_R, counts_E.cumsum(0).int()
        num_here, num_rows = num_experts // self.ep.size, experts_SK.numel()
        local_SK = experts_SK - self.ep.index * num_here
        is_here_SK = (local_SK >= 0) & (local_SK < num_here)
        rows_R, counts = self.ops.sort(local_SK.masked_fill(~is_here_SK, num_here), num_here + 1)
        ends_E, size = counts[:num_here].cumsum(0), self.limit.num_rows(num_rows, self.ep.size)
        self.limit.note(ends_E[-1], num_rows / self.ep.size)
        ends_E = ends_E.clamp(max=size)
        is_padding_R = torch.arange(size, device=rows_R.device) >= ends_E[-1]
        return rows_R[:size].masked_fill(is_padding_R, num_rows), ends_E.int()

    def used(self, ends_E: Tensor) -> Tensor | None:
        """Return how many rows are of tokens, on the device; None if all are."""
        return ends_E[-1] if self.ep.size > 1 else None

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
        return up.forward(experts.ops.gather(experts.gather(x_TD), rows_R, k, experts.used(ends_E)), ends_E)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dpacked_R2F: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, rows_R, ends_E = ctx.saved_tensors
        experts, up, k = ctx.experts, ctx.up, ctx.k
        ops, used = experts.ops, experts.used(ends_E)
        up.weight.check(ctx.epoch)
        x_SD = experts.gather(x_TD)
        dx_RD = up.dgrad(dpacked_R2F, ends_E)
        dx_TD = experts.sum(ops.combine(dx_RD, rows_R, len(x_SD), k, used))
        up.wgrad(lambda: (dpacked_R2F, ops.gather(x_SD, rows_R, k, used)), ends_E)
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
        weights_R = F.pad(weights_SK.flatten(), (0, 1)).index_select(0, rows_R)  # padding has none
        ctx.save_for_backward(packed_R2F, weights_R, rows_R, ends_E)
        ctx.experts, ctx.down, ctx.shape, ctx.epoch = experts, down, weights_SK.shape, down.weight.epoch
        ops, used = experts.ops, experts.used(ends_E)
        y_RD = down.forward(ops.weighted_swiglu(packed_R2F, weights_R, used), ends_E)
        num_tokens, k = weights_SK.shape
        return experts.sum(ops.combine(y_RD, rows_R, num_tokens, k, used))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout_TD: Tensor) -> tuple[Tensor | None, ...]:
        packed_R2F, weights_R, rows_R, ends_E = ctx.saved_tensors
        experts, down, (_, k) = ctx.experts, ctx.down, ctx.shape
        ops, used = experts.ops, experts.used(ends_E)
        down.weight.check(ctx.epoch)
        dout_SD = experts.gather(dout_TD.contiguous())
        dact_RF = down.dgrad(ops.gather(dout_SD, rows_R, k, used), ends_E)
        dpacked_R2F, dweights_R, act_RF = ops.weighted_swiglu_backward(dact_RF, packed_R2F, weights_R, used)
        down.wgrad(lambda: (ops.gather(dout_SD, rows_R, k, used), act_RF), ends_E)
        dweights = dweights_R.new_zeros(ctx.shape.numel() + 1).scatter_(0, rows_R, dweights_R)
        return dpacked_R2F, experts.sum(dweights[:-1].view(ctx.shape)), None, None, None, None
