"""The router of a layer: which experts each token goes to, and how much what they return counts.

Its product, scores and weights have the wide dtype whatever the rest has. Of equal scores that of the lower number
comes first, on any device. Sources: Shazeer and others 2017 (Outrageously Large Neural Networks); with sigmoids
DeepSeek-V3 (DeepSeek-AI, 2024, arXiv 2412.19437).
"""

from typing import Any

import torch
from torch import Tensor

from trainer.config import ModelConfig
from trainer.linear.weight import Weight, add_product
from trainer.model.balance import LayerBalance
from trainer.model.microbatch import MicroBatch
from trainer.ops.dtypes import wide_dtype
from trainer.ops.once import differentiable_once
from trainer.store.unit import Unit


class Router:
    """One score for each expert, of which the best take the token. Kept for the backward: the input, and scores."""

    def __init__(self, model: ModelConfig, unit: Unit, name: str, balance: LayerBalance) -> None:
        self.model, self.weight, self.balance = model, unit.weight(f"{name}.weight"), balance

    def __call__(self, x_TD: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return the weights of each token's experts, [T, K], wide, and their numbers, from the best on."""
        logits_TE = _Product.apply(x_TD, self.weight)
        scores_TE = scores(logits_TE, self.model)
        experts_TK = best(self.balance.compared(scores_TE.detach()), self.model.experts_per_token)
        scores_TE = self.balance.with_losses(scores_TE, logits_TE, experts_TK, batch)
        return weights(scores_TE.gather(1, experts_TK), self.model), experts_TK


def scores(logits_TE: Tensor, model: ModelConfig) -> Tensor:
    """Return what experts are compared by."""
    return torch.sigmoid(logits_TE) if model.router_score == "sigmoid" else torch.softmax(logits_TE, 1)


def best(scores_TE: Tensor, k: int) -> Tensor:
    """Return the numbers of the highest scores, from the highest on; of equal ones the lower number comes first."""
    return scores_TE.sort(dim=1, descending=True, stable=True).indices[:, :k].contiguous()


def weights(scores_TK: Tensor, model: ModelConfig) -> Tensor:
    """Return how much what experts with these scores return counts."""
    if model.router_norm_topk:
        scores_TK = scores_TK / (scores_TK.sum(1, keepdim=True) + torch.finfo(scores_TK.dtype).tiny)
    return scores_TK if model.router_scale == 1 else scores_TK * model.router_scale


class _Product(torch.autograd.Function):
    """The product of a router, in the wide dtype."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight: Weight) -> Tensor:
        ctx.save_for_backward(x_TD)
        ctx.weight, ctx.epoch = weight, weight.epoch
        wide = wide_dtype(x_TD.dtype)
        return x_TD.to(wide) @ weight.values.to(wide).t()

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dlogits_TE: Tensor) -> tuple[Tensor, None]:
        (x_TD,) = ctx.saved_tensors
        weight: Weight = ctx.weight
        weight.check(ctx.epoch)
        dx_TD = (dlogits_TE @ weight.values.to(dlogits_TE.dtype)).to(x_TD.dtype)
        weight.add_gradient(lambda out, first: add_product(out, dlogits_TE, x_TD.to(dlogits_TE.dtype), first=first))
        return dx_TD, None
