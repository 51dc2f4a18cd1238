"""Faults of tokens that go to experts of other ranks: other rows, other ranks, parts that are mixed up."""

from typing import Any

import torch

from ckptkit import ParallelLayout
from trainer.linear import grouped
from trainer.ops.experts import ExpertRows
from trainer.parallel import expert
from trainer.parallel.dispatch import Coming, Exchanged, Gathered, Routes, TokenGroups
from trainer.parallel.expert import ExpertParallel
from trainer.parallel.rows import RowLimit
from trainer.verify.faults.fault import EXPERTS, Fault
from trainer.verify.faults.planting import wrapping

EP = ParallelLayout(ep=2, dp=2)
WHOLE: dict[str, Any] = {"model": EXPERTS}
IN_PARTS: dict[str, Any] = {"model": EXPERTS, "moe_overlap_parts": 2}
EXCHANGED: dict[str, Any] = {"model": EXPERTS, "moe_dispatch": "alltoall"}


def of_the_part_before(real: Any, self: ExpertParallel, routes: Any) -> Any:
    return [*reversed(real(self, routes))]


def as_the_first_part(real: Any, parts: Any) -> torch.Tensor:
    """Take what the first part of tokens returns for all."""
    return torch.cat([parts[0]()[: len(part())] for part in parts]) if len(parts) > 1 else real(parts)


def of_the_last_part(real: Any, self: grouped.GroupedGemm, factors: Any, ends_E: torch.Tensor, *, ends: bool) -> None:
    if ends:
        real(self, factors, ends_E)


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


DISPATCH_FAULTS = (
    Fault(
        "expert-tokens-swapped-ep",
        "tokens of two ranks of ep change places",
        EP,
        wrapping(TokenGroups, "gather", other_source_first),
        **WHOLE,
    ),
    Fault(
        "experts-behind-own",
        "ranks of ep have the experts behind theirs",
        EP,
        wrapping(Gathered, "routes", next_experts),
        **WHOLE,
    ),
    Fault(
        "sources-swapped",
        "rows of two sources change places",
        EP,
        wrapping(Exchanged, "routes", as_arrived),
        **EXCHANGED,
    ),
    Fault(
        "rows-back-to-others",
        "rows come back to others",
        EP,
        wrapping(Exchanged, "_exchange_back", other_sizes_back),
        **EXCHANGED,
    ),
    Fault(
        "weights-stay-as-arrived",
        "weights stay where they arrived",
        EP,
        wrapping(Exchanged, "bring_weights", of_sent_order),
        **EXCHANGED,
    ),
    Fault(
        "rows-of-another-part",
        "a part takes another's rows",
        EP,
        wrapping(ExpertParallel, "by_part", of_the_part_before),
        **IN_PARTS,
    ),
    Fault(
        "part-returns-another",
        "a part returns what another's rows do",
        EP,
        wrapping(expert, "joined", as_the_first_part),
        **IN_PARTS,
    ),
    Fault(
        "gradients-of-last-part",
        "gradients of weights are those of the last part",
        EP,
        wrapping(grouped.GroupedGemm, "wgrad", of_the_last_part),
        **IN_PARTS,
    ),
    Fault(
        "overfull-step-trained",
        "a step with more rows than there is memory for is trained",
        EP,
        wrapping(RowLimit, "is_exceeded", lambda real, self, world: 0 * real(self, world)),
        moe_rows=1.0,
        **WHOLE,
    ),
)
