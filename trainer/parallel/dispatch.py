"""How the tokens of experts come to the ranks of ep that have these, and what they return comes back.

Gathered, each rank has the tokens of all, and takes the rows of its own experts: shapes are known beforehand, and no
host waits. Exchanged, a rank sends each row to the rank of its expert alone: fewer bytes travel, but how many rows come
is known from counts that the host reads. Either way rows come in the order of this rank's experts, those of one expert
in the order of source ranks and of their tokens. The way back is the adjoint of the way there: gradients of what came
are added up for each token, and those of what returned are sent again. Both ways are begun, and waited for by who reads
what comes: meanwhile the GPU computes.

For example 2 ranks of ep have experts 0-1 and 2-3, and a token each, whose rows are of experts 1 and 2: rank 0 keeps
its first row, sends the other, and gets the first of rank 1.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.mesh.group import Group, Work
from trainer.ops.experts import ExpertRows
from trainer.parallel.rows import RowLimit
from trainer.parallel.tensor import TensorParallel

# numbers of rows in the order of experts, the ends of those of each of this rank's, and what a dispatch needs besides
Routes = tuple[Tensor, ...]
Coming = Callable[[], Tensor]  # returns a tensor that is on its way, as often as it is called; the first time it waits


class Dispatch(Protocol):
    """The way of rows: T tokens of this rank with K experts each, R rows that come to it."""

    @property
    def num_routes(self) -> int:
        """Return how many tensors routes are."""
        ...

    def routes(self, experts_TK: Tensor, num_experts: int, ops: ExpertRows) -> Routes:
        """Return the way of this rank's rows, and of those that come to it."""
        ...

    def begin(self, x_TD: Tensor) -> Coming:
        """Begin to send tokens, as far as that needs no routes."""
        ...

    def bring(self, tokens: Coming, routes: Routes, k: int, ops: ExpertRows) -> Coming:
        """Go on sending them; what is coming are their rows, [R, D], which it makes at each call."""
        ...

    def send_back(self, y_RD: Tensor, routes: Routes, num_tokens: int, k: int, ops: ExpertRows) -> Coming:
        """Begin to bring the sums over experts of each of so many tokens, [T, D]; the argument may be overwritten."""
        ...

    def bring_weights(self, weights_TK: Tensor, routes: Routes) -> Tensor:
        """Return the weights of the rows that came, [R]."""
        ...

    def send_weights_back(self, weights_R: Tensor, routes: Routes, shape: torch.Size) -> Tensor:
        """Return those of each token's rows, [T, K]."""
        ...

    def used(self, routes: Routes) -> Tensor | None:
        """Return how many rows are of tokens, on the device; None if all are."""
        ...


@dataclass(frozen=True, slots=True)
class TokenGroups:
    """The groups over which tokens are gathered, in order, before rows are taken, and those of tp that have sums."""

    tensor: TensorParallel
    groups: tuple[Group, ...]

    @property
    def num_ranks(self) -> int:
        """Return of how many ranks a rank has the tokens then."""
        return torch.Size(group.size for group in self.groups).numel()

    def gather(self, x_TC: Tensor) -> Coming:
        """Begin to gather something of the tokens of all ranks, [S, C]; nothing travels if each rank has all tokens."""
        return in_turn(x_TC, [group.start_gather for group in self.groups])

    def sum(self, x_SC: Tensor) -> Coming:
        """Begin to sum it over ranks for this rank's tokens, [T, C]; the argument is overwritten."""
        calls: list[Callable[[Tensor], Work]] = [group.start_scatter for group in reversed(self.groups)]
        if not self.tensor.cuts_tokens and self.tensor.group.size > 1:
            calls.append(lambda x: self.tensor.group.start("all_reduce", x, "sum"))
        return in_turn(x_SC, calls)


def in_turn(x: Tensor, calls: Sequence[Callable[[Tensor], Work]]) -> Coming:
    """Begin calls of groups, each with what came of the one before: all but the last are waited for."""
    if not calls:
        return lambda: x
    for call in calls[:-1]:
        x = call(x).wait()
    return cache(calls[-1](x).wait)


@dataclass(frozen=True, slots=True)
class Gathered:
    """Each rank gathers the tokens of all. Behind the rows of tokens is padding, of the number behind all rows."""

    tokens: TokenGroups
    ep: Group
    limit: RowLimit

    @property
    def num_routes(self) -> int:
        return 2

    def routes(self, experts_TK: Tensor, num_experts: int, ops: ExpertRows) -> Routes:
        experts_SK = self.tokens.gather(experts_TK)()
        if self.ep.size == 1:
            rows_R, counts_E = ops.sort(experts_SK, num_experts)
            return rows_R, counts_E.cumsum(0).int()
        num_here, num_rows = num_experts // self.ep.size, experts_SK.numel()
        local_SK = experts_SK - self.ep.index * num_here
        is_here_SK = (local_SK >= 0) & (local_SK < num_here)
        rows_R, counts = ops.sort(local_SK.masked_fill(~is_here_SK, num_here), num_here + 1)
        ends_E, size = counts[:num_here].cumsum(0), self.limit.num_rows(num_rows, self.ep.size)
        self.limit.note(ends_E[-1], num_rows / self.ep.size)
        ends_E = ends_E.clamp(max=size)
        is_padding_R = torch.arange(size, device=rows_R.device) >= ends_E[-1]
        return rows_R[:size].masked_fill(is_padding_R, num_rows), ends_E.int()

    def begin(self, x_TD: Tensor) -> Coming:
        return self.tokens.gather(x_TD)

    def bring(self, tokens: Coming, routes: Routes, k: int, ops: ExpertRows) -> Coming:
        return lambda: ops.gather(tokens(), routes[0], k, self.used(routes))

    def send_back(self, y_RD: Tensor, routes: Routes, num_tokens: int, k: int, ops: ExpertRows) -> Coming:
        num_gathered = num_tokens * self.tokens.num_ranks
        return self.tokens.sum(ops.combine(y_RD, routes[0], num_gathered, k, self.used(routes)))

    def bring_weights(self, weights_TK: Tensor, routes: Routes) -> Tensor:
        weights_SK = self.tokens.gather(weights_TK)()
        return F.pad(weights_SK.flatten(), (0, 1)).index_select(0, routes[0])  # padding has none

    def send_weights_back(self, weights_R: Tensor, routes: Routes, shape: torch.Size) -> Tensor:
        num_rows = shape.numel() * self.tokens.num_ranks
        weights = weights_R.new_zeros(num_rows + 1).scatter_(0, routes[0], weights_R)
        return self.tokens.sum(weights[:-1].view(-1, shape[1]))()

    def used(self, routes: Routes) -> Tensor | None:
        return routes[1][-1] if self.ep.size > 1 else None


@dataclass(frozen=True, slots=True)
class Exchanged:
    """Each row travels to the rank of its expert; the host waits for their counts.

    Routes are also the places, in the order of arrival, of the rows that came, and on the host how many rows go to each
    rank and come from it, [2, ranks].
    """

    tokens: TokenGroups
    ep: Group
    limit: RowLimit

    @property
    def num_routes(self) -> int:
        return 4

    def routes(self, experts_TK: Tensor, num_experts: int, ops: ExpertRows) -> Routes:
        experts_SK = self.tokens.gather(experts_TK)()
        sent_R, counts = ops.sort(experts_SK, num_experts)
        counts_GE = self.ep.start_exchange(counts.view(self.ep.size, -1)).wait()  # of ranks, of this one's experts
        sizes = self._sizes(counts, counts_GE, experts_SK.numel())
        experts_E, num_rows = torch.arange(counts_GE.shape[1], device=counts.device), sum(sizes[1].tolist())
        experts_GE = experts_E.repeat(self.ep.size)
        experts_R = experts_GE.repeat_interleave(counts_GE.flatten(), output_size=num_rows)  # in the order of arrival
        places_R = experts_R.sort(stable=True).indices
        ends_E = counts_GE.sum(0).cumsum(0)
        self.limit.note(ends_E[-1], experts_SK.numel())
        return sent_R, ends_E.int(), places_R, sizes

    def begin(self, x_TD: Tensor) -> Coming:
        return self.tokens.gather(x_TD)

    def bring(self, tokens: Coming, routes: Routes, k: int, ops: ExpertRows) -> Coming:
        sent_R, _, places_R, _ = routes
        arrived = self._exchange(ops.gather(tokens(), sent_R, k), routes)
        return lambda: arrived().index_select(0, places_R)

    def send_back(self, y_RD: Tensor, routes: Routes, num_tokens: int, k: int, ops: ExpertRows) -> Coming:
        returned_RD = self._exchange_back(y_RD, routes)
        return self.tokens.sum(ops.combine(returned_RD, routes[0], num_tokens * self.tokens.num_ranks, k))

    def bring_weights(self, weights_TK: Tensor, routes: Routes) -> Tensor:
        weights_R = self.tokens.gather(weights_TK)().flatten().index_select(0, routes[0])
        return self._exchange(weights_R, routes)().index_select(0, routes[2])

    def send_weights_back(self, weights_R: Tensor, routes: Routes, shape: torch.Size) -> Tensor:
        returned_R = self._exchange_back(weights_R, routes)
        weights_SK = returned_R.new_empty(len(returned_R)).scatter_(0, routes[0], returned_R).view(-1, shape[1])
        return self.tokens.sum(weights_SK)()

    def used(self, routes: Routes) -> Tensor | None:
        return None

    def _sizes(self, counts_E: Tensor, counts_GE: Tensor, num_rows: int) -> Tensor:
        """Return how many rows go to each rank and come from it, on the host, which waits; evenly if nobody counted."""
        if counts_E.is_meta:
            even_G = (num_rows + self.ep.size - 1 - torch.arange(self.ep.size)) // self.ep.size
            return torch.stack([even_G, even_G[self.ep.index].expand(self.ep.size)])
        return torch.stack([counts_E.view(self.ep.size, -1).sum(1), counts_GE.sum(1)]).cpu()

    def _exchange(self, sent: Tensor, routes: Routes) -> Coming:
        """Begin to bring what each rank sends, in the order of ranks."""
        to_each, from_each = routes[3].tolist()
        return cache(self.ep.start_exchange(sent, to_each, from_each).wait)

    def _exchange_back(self, rows: Tensor, routes: Routes) -> Tensor:
        """Return what comes back, in the order in which rows were sent."""
        to_each, from_each = routes[3].tolist()
        arrived = torch.empty_like(rows).index_copy_(0, routes[2], rows)
        return self.ep.start_exchange(arrived, from_each, to_each).wait()
