"""Faults of experts: other tokens, other weights, sums that lack a part, gradients that are stale. See `faults`."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ckptkit.model.layout import ParallelLayout
from tests.support.checks import require_equal
from tests.trainer.support.faults import TP, Fault, Patch, wrapping
from tests.trainer.support.moe import engine_of, mixture
from tests.trainer.support.parity import assert_parity, local_batch, run_steps
from tests.trainer.support.recompute_faults import compare_again, making
from trainer import engine
from trainer.config import Config
from trainer.config.resolve import layout_of
from trainer.linear import grouped
from trainer.model import router
from trainer.model.balance import Balance, LayerBalance
from trainer.model.moe import MoE
from trainer.ops.experts import ExpertRows
from trainer.parallel import expert
from trainer.parallel.dispatch import Coming, Exchanged, Gathered, Routes, TokenGroups
from trainer.parallel.expert import ExpertParallel
from trainer.parallel.rows import RowLimit
from trainer.verify.plain_model import logits
from trainer.verify.threads import run_threads

EXPERTS: dict[str, Any] = {  # of the model that faults are planted in: some have no token in a micro-batch
    "bias": False,
    "num_experts": 8,
    "experts_per_token": 2,
    "expert_ffn_hidden_size": 4,
    "num_shared_experts": 1,
}
EP, EP_OF_TP = ParallelLayout(ep=2, dp=2), ParallelLayout(tp=2, ep=4, dp=2, etp=1)
WHOLE: dict[str, Any] = {"model": EXPERTS}
AUX: dict[str, Any] = {"model": EXPERTS | {"moe_balance": "aux", "moe_aux_coeff": 1.0}}
CUT: dict[str, Any] = {"model": EXPERTS, "cuts_tokens": True}
IN_PARTS: dict[str, Any] = {"model": EXPERTS, "moe_overlap_parts": 2}
EXCHANGED: dict[str, Any] = {"model": EXPERTS, "moe_dispatch": "alltoall"}


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


def higher_numbers_first(real: Any, scores_TE: torch.Tensor, k: int) -> torch.Tensor:
    return scores_TE.shape[1] - 1 - real(scores_TE.flip(1), k)


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


def of_the_part_before(real: Any, self: ExpertParallel, routes: Any) -> Any:
    return [*reversed(real(self, routes))]


def as_the_first_part(real: Any, parts: Any) -> torch.Tensor:
    """Take what the first part of tokens returns for all."""
    return torch.cat([parts[0]()[: len(part())] for part in parts]) if len(parts) > 1 else real(parts)


def of_the_last_part(real: Any, self: grouped.GroupedGemm, factors: Any, ends_E: torch.Tensor, *, ends: bool) -> None:
    if ends:
        real(self, factors, ends_E)


def router_of_one_rank(real: Any, config: Any) -> Any:
    return {name: replace(row, is_partial=".router." not in name) for name, row in real(config).items()}


def router_of_all_ranks(real: Any, config: Any) -> Any:
    return {name: replace(row, is_partial=row.is_partial or ".router." in name) for name, row in real(config).items()}


def detached_sum(real: Any, scores_TK: torch.Tensor, model: Any) -> torch.Tensor:
    return scores_TK / scores_TK.detach().sum(1, keepdim=True)


def routed_otherwise(patch: Patch) -> None:
    real = router.best
    with making(patch) as is_again:
        patch.setattr(router, "best", lambda scores, k: real(-scores if is_again() else scores, k))


def compare_ties() -> None:
    """Where all scores are equal, the first experts take each token, as in plain torch."""
    config = mixture("plain")
    live = engine_of(config, router=0.0)
    batch = local_batch(config, 0, live.mesh)
    state = {name: value.double() for name, value in live.store.values()}
    tokens, labels, positions = (part.flatten(0, 1) for part in (batch.tokens, batch.labels, batch.positions))
    logs = torch.log_softmax(logits(config.model, state, tokens, positions, lambda x, **place: x), -1)
    losses = -logs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    expected = (losses * batch.loss_mask.flatten(0, 1)).sum().item()
    total, _ = live.eval_batch(batch)
    require_equal(abs(total / expected - 1) < 1e-10, f"{total} in place of {expected}")


def shows_again(way: str = "none", **again: Any) -> Any:
    return partial(compare_again, balanced("plain", "tp1", way), **again)


def balanced(name: str, layout: str, way: str, **parallel: Any) -> Config:
    config = mixture(name, layout, **parallel)
    rates = {"bias": {"moe_bias_rate": 0.1}, "aux": {"moe_aux_coeff": 1.0}}.get(way, {})
    return replace(config, model=replace(config.model, moe_balance=way, **rates))


def compare_balanced(layout: str, way: str, **parallel: Any) -> None:
    """A layout and one process with as many rows a micro-batch."""
    config = balanced("shared", layout, way, **parallel)
    runs = run_threads(layout_of(config).world_size, run_steps, config, 2)
    assert_parity(runs, run_steps(0, balanced("shared", "tp1", way), 2))


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


def other_source_first(real: Any, self: TokenGroups, x_TC: torch.Tensor) -> Coming:
    whole = real(self, x_TC)()
    is_moved = whole.is_floating_point() and whole.shape[1] > 2
    return lambda: whole.roll(len(x_TC), 0) if is_moved else whole


def next_experts(real: Any, self: Gathered, experts_TK: torch.Tensor, num_experts: int, ops: ExpertRows) -> Any:
    return real(self, (experts_TK + 1) % num_experts if self.ep.size > 1 else experts_TK, num_experts, ops)


def other_sizes_back(real: Any, self: Exchanged, rows: torch.Tensor, routes: Routes) -> torch.Tensor:
    """Take what came back in the order in which it arrived."""
    return real(self, rows, (routes[0], routes[1], torch.arange(len(rows)), routes[3]))


def of_sent_order(real: Any, self: Exchanged, weights_TK: torch.Tensor, routes: Routes) -> torch.Tensor:
    """Leave weights as they arrived."""
    return real(self, weights_TK, (routes[0], routes[1], torch.arange(len(routes[2])), routes[3]))


def as_arrived(real: Any, self: Exchanged, *inputs: Any) -> Any:
    """Take the rows that came as if one rank had sent all of them."""
    sent_R, ends_E, places_R, sizes = real(self, *inputs)
    return sent_R, ends_E, torch.arange(len(places_R)), sizes


MOE_FAULTS = [
    Fault(
        "the weights of a token's experts count twice",
        None,
        wrapping(
            ExpertRows,
            "weighted_swiglu",
            lambda real, self, packed, weights, used: real(self, packed, weights**2, used),
        ),
        **WHOLE,
    ),
    Fault("each expert's rows end one later", None, wrapping(Gathered, "routes", moved_by_one), **WHOLE),
    Fault(
        "an expert without tokens keeps the gradient of a step before",
        None,
        wrapping(grouped, "add_products", stale),
        **WHOLE,
    ),
    Fault(
        "equal scores go to higher numbers", None, wrapping(router, "best", higher_numbers_first), shows=compare_ties
    ),
    Fault("a token's last expert is not added", None, wrapping(ExpertRows, "combine", only_the_first), **WHOLE),
    Fault("rows of an expert beyond the mean are dropped", None, wrapping(MoE, "narrow", beyond_the_mean), **WHOLE),
    Fault(
        "the sum that scores are divided by has no gradient", None, wrapping(router, "weights", detached_sum), **WHOLE
    ),
    Fault(
        "gradients of rows are written where other rows were",
        None,
        wrapping(
            ExpertRows,
            "weighted_swiglu_backward",
            of_other_rows,
        ),
        **WHOLE,
    ),
    Fault("tokens of two tp ranks change places", TP, wrapping(TokenGroups, "gather", other_rank_first), **CUT),
    Fault(
        "one tp rank contributes the gradient of a router, of its own tokens",
        TP,
        wrapping(engine, "parameter_table", router_of_one_rank),
        **CUT,
    ),
    Fault(
        "both tp ranks contribute the gradient of a router, of the same tokens",
        TP,
        wrapping(engine, "parameter_table", router_of_all_ranks),
        **WHOLE,
    ),
    Fault(
        "gradients of experts' weights are not summed over tp",
        TP,
        wrapping(TokenGroups, "sum", of_each_rank),
        **WHOLE,
    ),
    Fault(
        "what experts return is not summed over tp",
        TP,
        wrapping(TokenGroups, "sum", lambda real, self, x: lambda: x),
        **WHOLE,
    ),
    Fault("tokens of two ranks of ep change places", EP, wrapping(TokenGroups, "gather", other_source_first), **WHOLE),
    Fault("ranks of ep have the experts behind theirs", EP, wrapping(Gathered, "routes", next_experts), **WHOLE),
    Fault("rows of two sources change places", EP, wrapping(Exchanged, "routes", as_arrived), **EXCHANGED),
    Fault("rows come back to others", EP, wrapping(Exchanged, "_exchange_back", other_sizes_back), **EXCHANGED),
    Fault("weights stay where they arrived", EP, wrapping(Exchanged, "bring_weights", of_sent_order), **EXCHANGED),
    Fault("a part takes another's rows", EP, wrapping(ExpertParallel, "by_part", of_the_part_before), **IN_PARTS),
    Fault("a part returns what another's rows do", EP, wrapping(expert, "joined", as_the_first_part), **IN_PARTS),
    Fault(
        "gradients of weights are those of the last part",
        EP,
        wrapping(grouped.GroupedGemm, "wgrad", of_the_last_part),
        **IN_PARTS,
    ),
    Fault(
        "a step with more rows than there is memory for is trained",
        None,
        wrapping(RowLimit, "is_exceeded", lambda real, self, world: 0 * real(self, world)),
        shows=partial(compare_balanced, "ep2-dp2", "none", moe_rows=1.0),
    ),
    Fault(
        "biases move by the counts of one rank",
        None,
        wrapping(Balance, "update", own_counts),
        shows=partial(compare_balanced, "dp2", "bias"),
    ),
    Fault(
        "the loss that spreads tokens lacks the step's factor",
        None,
        wrapping(LayerBalance, "with_losses", unscaled),
        **AUX,
    ),
    Fault(
        "the loss that spreads tokens counts twice where it is made again",
        None,
        twice_in_the_second_pass,
        shows=shows_again("aux", recompute="full"),
    ),
    Fault(
        "the loss that spreads tokens sees the tokens of one rank",
        None,
        wrapping(LayerBalance, "_spread", alone_in_tp),
        shows=partial(compare_balanced, "tp2", "aux"),
    ),
    Fault("tokens go to other experts in the second pass", None, routed_otherwise, shows=shows_again(recompute="full")),
]
