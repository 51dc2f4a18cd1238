"""Balance: how many tokens go to each expert, and what spreads them: biases, or losses.

Tokens are counted in the forward passes of a step, once over all ranks. After a step that counts, the bias of an expert
with less than the mean goes up by a rate, that of one with more goes down. It takes part in the choice of experts, not
in their weights. For example with counts 5, 1, 3, 3 and rate 0.001 the biases of experts 0 and 1 move by -0.001 and
0.001. Source: Wang and others, 2024 (Auxiliary-Loss-Free Load Balancing, arXiv 2408.15664).

The losses are of one micro-batch or one row (Fedus and others, 2021, arXiv 2101.03961), whose tokens may be on several
ranks. They take part in gradients alone, as one more loss of the tokens that count, and are not in the loss that a run
logs. Their size depends on how the batch is cut into micro-batches, not on the layout.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ckptkit import Box, Coords, Piece, Placement, TensorInfo
from trainer.config import Config, ModelConfig
from trainer.config.resolve import cuts_tokens, has_experts
from trainer.mesh.group import Group
from trainer.mesh.mesh import ProcessMesh
from trainer.model.microbatch import MicroBatch, Scale
from trainer.ops.once import differentiable_once
from trainer.parallel.expert import ExpertParallel
from trainer.parallel.rows import RowLimit
from trainer.parallel.tensor import TensorParallel

MOST_IDLE = 100  # steps without a token, after which an expert counts as idle
DTYPES = {torch.float64: "F64", torch.float32: "F32"}


class Balance:
    """Counts and biases of all layers with experts, on one rank; owned by the training thread.

    Row l of `counts_LE` and `bias_LE` is the l-th layer that has experts: this rank counts for those of its stages.
    `loads` are the largest load of an expert over the mean, in any layer of the last step, and the experts that had no
    token in 100 steps. If ep cuts experts the largest load of a rank over the mean is behind them, and the most rows
    that a micro-batch needed. `limit` bounds these, and makes a step void that needs more.
    """

    def __init__(self, config: Config, mesh: ProcessMesh, dtype: torch.dtype) -> None:
        model = config.model
        self.layers = [layer for layer in range(model.num_layers) if has_experts(model, layer)]
        shape, self._coords = (len(self.layers), model.num_experts), mesh.coords
        self._model, self._cp, self._here = model, mesh.cp, set[int]()
        self.rate = model.moe_bias_rate if model.moe_balance == "bias" else 0.0
        self.counts_here = cuts_tokens(config) or mesh.coords.tp == 0  # else all tp ranks have the same tokens
        self.counts_LE = torch.zeros(shape, dtype=torch.float64, device=mesh.device)
        self.bias_LE = torch.zeros(shape, dtype=dtype, device=mesh.device)
        self._idle_LE = torch.zeros(shape, dtype=torch.int32, device=mesh.device)
        self._is_step = False
        self.loads = torch.zeros(0, dtype=torch.float64, device=mesh.device)
        self._ep, self._borrows_tp = mesh.ep, mesh.layout.etp is not None
        self._dispatch = config.parallel.moe_dispatch
        bound = config.parallel.moe_rows if self._dispatch == "allgather" else math.inf
        self.limit = RowLimit(bound, mesh.device)

    def of(self, layer: int, tensor: TensorParallel) -> "LayerBalance":
        """Return what spreads the tokens of a layer of this rank."""
        self._here.add(layer)
        bias_E = self.bias_LE[self.layers.index(layer)] if self.rate else None
        return LayerBalance(self._model, bias_E, tensor, self._cp)

    def count(self, layer: int, experts_TK: Tensor) -> None:
        """Count the experts of this rank's tokens, if a step is under way: what is made again does not come here."""
        if self.counts_here and self._is_step:
            ones = torch.ones(experts_TK.numel(), dtype=torch.float64, device=experts_TK.device)
            self.counts_LE[self.layers.index(layer)].scatter_add_(0, experts_TK.flatten(), ones)

    def ranks(self, tensor: TensorParallel) -> ExpertParallel:
        """Return the ranks that tokens are brought to."""
        return ExpertParallel.of(tensor, self._ep, self.limit, self._dispatch, borrows_tp=self._borrows_tp)

    def begin_step(self, step: int) -> None:
        """Count from now on."""
        self._is_step = True
        self.limit.begin_step(step)
        self.counts_LE.zero_()

    def update(self, counts: Tensor, is_void: Tensor) -> None:
        """End a step with the counts of all ranks: move the biases, unless it is void."""
        self._is_step = False
        if not self.layers:
            return
        counts_LE = counts.view_as(self.counts_LE)
        mean_L1 = counts_LE.mean(1, keepdim=True)
        if self.rate:
            steps_LE = torch.sign(mean_L1 - counts_LE).to(self.bias_LE.dtype) * (1 - is_void).to(self.bias_LE.dtype)
            self.bias_LE.add_(steps_LE, alpha=self.rate)
        idle_LE = torch.where(counts_LE > 0, 0, self._idle_LE + 1)
        self._idle_LE = torch.where(is_void > 0, self._idle_LE, idle_LE)
        largest = (counts_LE / mean_L1).max()
        loads = [largest, (self._idle_LE >= MOST_IDLE).sum()]
        if self._ep.size > 1:
            of_ranks = counts_LE.unflatten(1, (self._ep.size, -1)).sum(2)
            loads += [(of_ranks / of_ranks.mean(1, keepdim=True)).max(), self.limit.most]
        self.loads = torch.stack([load.to(largest.dtype) for load in loads])

    # --- in a checkpoint

    @property
    def tensors(self) -> list[TensorInfo]:
        """Return the biases as tensors of a checkpoint, the same on every rank."""
        kind, size = DTYPES[self.bias_LE.dtype], self.bias_LE.shape[1]
        layers = self.layers if self.rate else []
        return [TensorInfo(bias_name(layer), kind, (size,), Placement(layer)) for layer in layers]

    def pieces(self) -> list[Piece]:
        """Return the biases of this rank's layers, as views of the live state."""
        size = self.bias_LE.shape[1]
        return [
            Piece(bias_name(layer), Box.whole((size,)), 0, size, self.bias_LE[self.layers.index(layer)])
            for layer in sorted(self._here)
            if self.rate
        ]

    def saved_pieces(self) -> list[Piece]:
        """Return them if this rank saves them: the first of those with the same layers."""
        return self.pieces() if self._coords == Coords(pp=self._coords.pp) else []


@dataclass(frozen=True, slots=True)
class LayerBalance:
    """What spreads the tokens of one layer: its biases, or a loss, and the groups over which a micro-batch is cut."""

    model: ModelConfig
    bias_E: Tensor | None
    tensor: TensorParallel
    cp: Group

    def compared(self, scores_TE: Tensor) -> Tensor:
        """Return what experts are chosen by."""
        return scores_TE if self.bias_E is None else scores_TE + self.bias_E

    def with_losses(self, scores_TE: Tensor, logits_TE: Tensor, experts_TK: Tensor, batch: MicroBatch) -> Tensor:
        """Return the scores, whose gradient has that of the losses on them too, in a step."""
        if batch.scale is None:
            return scores_TE
        losses = []
        if self.model.moe_z_loss:
            squares_T = logits_TE.logsumexp(1).square()
            mask_T = batch.own(batch.loss_mask_S).to(squares_T.dtype)
            losses.append(self.model.moe_z_loss * (squares_T * mask_T).sum())
        if self.model.moe_balance in ("aux", "seq_aux"):
            losses.append(self.model.moe_aux_coeff * self._spread(scores_TE, experts_TK, batch))
        return _WithLoss.apply(scores_TE, sum(losses[1:], losses[0]), batch.scale) if losses else scores_TE

    def _spread(self, scores_TE: Tensor, experts_TK: Tensor, batch: MicroBatch) -> Tensor:
        """Return this rank's part of the loss of its micro-batch or its rows, times the tokens in them that count.

        Of B segments with n tokens each it is E / (K n^2) times the sum over experts of how many tokens have them and
        the sum of their scores. Of 4 tokens that go evenly to 2 experts, one each, with scores of 1/2: 2 / 16 * 8 = 1.
        """
        model, wide = self.model, scores_TE.dtype
        num_experts, k = model.num_experts, model.experts_per_token
        size = len(batch.tokens_S) * self.cp.size
        num_segments, rows_T = 1, torch.zeros(len(scores_TE), dtype=torch.int64, device=scores_TE.device)
        if model.moe_balance == "seq_aux":
            num_segments, size = size // batch.seq_length, batch.seq_length
            places = [torch.arange(run.start, run.stop, device=rows_T.device) for run in batch.own_runs or batch.runs]
            rows_T = torch.cat(places) // size % num_segments
        is_of_BT = (rows_T == torch.arange(num_segments, device=rows_T.device).unsqueeze(1)).to(wide)
        counts_TE = torch.zeros_like(scores_TE, requires_grad=False).scatter_(1, experts_TK, 1.0)
        mask_T = batch.own(batch.loss_mask_S).to(wide)
        sums_BC = is_of_BT @ torch.cat([counts_TE, mask_T.unsqueeze(1)], 1)  # of all ranks with these rows, then
        for group in (self.cp, *([self.tensor.group] if self.tensor.cuts_tokens else [])):
            group.all_reduce(sums_BC)
        shares_TE = scores_TE / scores_TE.sum(1, keepdim=True)  # of softmax they are the scores
        factors_B1 = num_experts / (k * size**2) * sums_BC[:, num_experts:]
        return (factors_B1 * sums_BC[:, :num_experts] * (is_of_BT @ shares_TE)).sum()


class _WithLoss(torch.autograd.Function):
    """Hands a loss its gradient, the step's factor of a token's loss, on the way of that of scores."""

    @staticmethod
    def forward(ctx: Any, scores_TE: Tensor, loss: Tensor, scale: Scale) -> Tensor:
        ctx.scale = scale
        return scores_TE.view_as(scores_TE)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dscores_TE: Tensor) -> tuple[Tensor, Tensor, None]:
        return dscores_TE, ctx.scale(), None


def bias_name(layer: int) -> str:
    """Return the name of the biases of a layer in a checkpoint."""
    return f"layers.{layer}.mlp.router.expert_bias"
