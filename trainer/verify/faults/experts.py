"""Faults of experts: other tokens, other weights, sums that lack a part, gradients that are stale."""

from dataclasses import replace
from typing import Any

import torch

from trainer import engine
from trainer.linear import grouped
from trainer.model import router
from trainer.model.balance import Balance, LayerBalance
from trainer.model.moe import MoE
from trainer.ops.experts import ExpertRows
from trainer.parallel.dispatch import Coming, Gathered, TokenGroups
from trainer.verify.faults.fault import DP, EXPERTS, SCHEDULES, TP, Fault
from trainer.verify.faults.planting import Patch, wrapping
from trainer.verify.faults.recompute import making

WHOLE: dict[str, Any] = {"model": EXPERTS}
AUX: dict[str, Any] = {"model": EXPERTS | {"moe_balance": "aux", "moe_aux_coeff": 1.0}}
CUT: dict[str, Any] = {"model": EXPERTS, "cuts_tokens": True}


def moved_by_one(real: Any, self: Gathered, experts_TK: torch.Tensor, num_experts: int, ops: ExpertRows) -> Any:
    rows_R, ends_E = real(self, experts_TK, num_experts, ops)
    return rows_R, (ends_E + 1).clamp(max=len(rows_R))


def stale(
    real: Any, out: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, ends: torch.Tensor, parts: int, **first: bool
) -> None:
    before = out.clone()
    real(out, dy, x, ends, parts, **first)
    is_empty = ends.diff(prepend=ends.new_zeros(1)) == 0
    for sums, old in zip(out.chunk(parts), before.chunk(parts), strict=True):
        sums[is_empty] = old[is_empty]


def only_the_first(
    real: Any, self: ExpertRows, y_RD: torch.Tensor, rows_R: torch.Tensor, num_tokens: int, k: int, *used: Any
) -> torch.Tensor:
    return real(self, y_RD * (rows_R % k < k - 1).unsqueeze(1), rows_R, num_tokens, k, *used)


def of_other_rows(real: Any, *inputs: Any) -> tuple[torch.Tensor, ...]:
    *gradients, act_RF = real(*inputs)
    return *(part.roll(1, 0) for part in gradients), act_RF


def beyond_the_mean(real: Any, self: MoE, *inputs: torch.Tensor) -> torch.Tensor:
    """Drop what an expert has beyond the mean."""
    weights_TK, experts_TK, packed_R2F, rows_R, ends_E, *shared = inputs
    begins_E = ends_E - ends_E.diff(prepend=ends_E.new_zeros(1))
    place_R = torch.arange(len(rows_R))
    expert_R = torch.searchsorted(ends_E, place_R.int(), right=True)
    is_beyond_R = place_R - begins_E[expert_R] >= len(rows_R) / len(ends_E)
    packed_R2F = packed_R2F.masked_fill(is_beyond_R.unsqueeze(1), 0)
    return real(self, weights_TK, experts_TK, packed_R2F, rows_R, ends_E, *shared)


def other_rank_first(real: Any, self: TokenGroups, x_TC: torch.Tensor) -> Coming:
    whole = real(self, x_TC)()
    is_moved = x_TC.shape[1] > 2 and len(whole) > len(x_TC)
    return lambda: whole.roll(len(x_TC), 0) if is_moved else whole


def of_each_rank(real: Any, self: TokenGroups, x_SC: torch.Tensor) -> Coming:
    """Leave the gradients of weights as each rank has them, and sum what is wide."""
    return real(self, x_SC) if x_SC.shape[1] > 2 else lambda: x_SC


def router_of_one_rank(real: Any, config: Any) -> Any:
    return {name: replace(row, is_partial=".router." not in name) for name, row in real(config).items()}


def router_of_all_ranks(real: Any, config: Any) -> Any:
    return {name: replace(row, is_partial=row.is_partial or ".router." in name) for name, row in real(config).items()}


def routed_otherwise(patch: Patch) -> None:
    real = router.best
    with making(patch) as is_again:
        patch.setattr(router, "best", lambda scores, k: real(-scores if is_again() else scores, k))


def detached_sum(real: Any, scores_TK: torch.Tensor, model: Any) -> torch.Tensor:
    return scores_TK / scores_TK.detach().sum(1, keepdim=True)


def own_counts(real: Any, self: Balance, counts: torch.Tensor, is_void: torch.Tensor) -> None:
    real(self, self.counts_LE.flatten(), is_void)


def unscaled(real: Any, self: LayerBalance, scores: torch.Tensor, *inputs: Any) -> torch.Tensor:
    *others, batch = inputs
    if batch.scale is not None:
        batch = replace(batch, scale=lambda: torch.ones((), dtype=torch.float64))
    return real(self, scores, *others, batch)


def alone_in_tp(real: Any, self: LayerBalance, *inputs: Any) -> torch.Tensor:
    return real(replace(self, tensor=replace(self.tensor, cuts_tokens=False)), *inputs)


def twice_in_the_second_pass(patch: Patch) -> None:
    real = LayerBalance.with_losses
    with making(patch) as is_again:

        def with_losses(self: LayerBalance, scores: torch.Tensor, *inputs: Any) -> torch.Tensor:
            scores = real(self, scores, *inputs)
            return real(self, scores, *inputs) if is_again() else scores

        patch.setattr(LayerBalance, "with_losses", with_losses)


EXPERT_FAULTS = (
    Fault(
        "expert-weights-squared",
        "the weights of a token's experts count twice",
        None,
        wrapping(
            ExpertRows,
            "weighted_swiglu",
            lambda real, self, packed, weights, used: real(self, packed, weights**2, used),
        ),
        **WHOLE,
    ),
    Fault(
        "expert-rows-end-later",
        "each expert's rows end one later",
        None,
        wrapping(Gathered, "routes", moved_by_one),
        **WHOLE,
    ),
    Fault(
        "empty-expert-stale",
        "an expert without tokens keeps the gradient of a step before",
        None,
        wrapping(grouped, "add_products", stale),
        **WHOLE,
    ),
    Fault(
        "last-expert-not-added",
        "a token's last expert is not added",
        None,
        wrapping(ExpertRows, "combine", only_the_first),
        **WHOLE,
    ),
    Fault(
        "rows-beyond-mean-dropped",
        "rows of an expert beyond the mean are dropped",
        None,
        wrapping(MoE, "narrow", beyond_the_mean),
        **WHOLE,
    ),
    Fault(
        "router-sum-detached",
        "the sum that scores are divided by has no gradient",
        None,
        wrapping(router, "weights", detached_sum),
        **WHOLE,
    ),
    Fault(
        "gradient-rows-elsewhere",
        "gradients of rows are written where other rows were",
        None,
        wrapping(ExpertRows, "weighted_swiglu_backward", of_other_rows),
        **WHOLE,
    ),
    Fault(
        "expert-tokens-swapped-tp",
        "tokens of two tp ranks change places",
        TP,
        wrapping(TokenGroups, "gather", other_rank_first),
        **CUT,
    ),
    Fault(
        "router-of-one-rank",
        "one tp rank contributes the gradient of a router, of its own tokens",
        TP,
        wrapping(engine, "parameter_table", router_of_one_rank),
        **CUT,
    ),
    Fault(
        "router-of-all-ranks",
        "both tp ranks contribute the gradient of a router, of the same tokens",
        TP,
        wrapping(engine, "parameter_table", router_of_all_ranks),
        **WHOLE,
    ),
    Fault(
        "expert-weights-not-summed",
        "gradients of experts' weights are not summed over tp",
        TP,
        wrapping(TokenGroups, "sum", of_each_rank),
        **WHOLE,
    ),
    Fault(
        "experts-not-summed",
        "what experts return is not summed over tp",
        TP,
        wrapping(TokenGroups, "sum", lambda real, self, x: lambda: x),
        **WHOLE,
    ),
    Fault(
        "biases-by-own-counts",
        "biases move by the counts of one rank",
        DP,
        wrapping(Balance, "update", own_counts),
        model=EXPERTS | {"moe_balance": "bias", "moe_bias_rate": 0.1},
    ),
    Fault(
        "aux-loss-unscaled",
        "the loss that spreads tokens lacks the step's factor",
        None,
        wrapping(LayerBalance, "with_losses", unscaled),
        peer="NVIDIA-NeMo/Automodel#1408",
        **AUX,
    ),
    Fault(
        "aux-loss-twice",
        "the loss that spreads tokens counts twice where it is made again",
        None,
        twice_in_the_second_pass,
        train={"recompute": "full"},
        check=SCHEDULES,
        **AUX,
    ),
    Fault(
        "aux-loss-of-own-tokens",
        "the loss that spreads tokens sees the tokens of one rank",
        TP,
        wrapping(LayerBalance, "_spread", alone_in_tp),
        **AUX,
        cuts_tokens=True,
    ),
    Fault(
        "routed-otherwise-again",
        "tokens go to other experts in the second pass",
        None,
        routed_otherwise,
        train={"recompute": "full"},
        check=SCHEDULES,
        **WHOLE,
    ),
)
