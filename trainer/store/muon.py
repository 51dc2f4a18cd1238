"""Muon over the ranks that hold a matrix: intervals travel to the one that takes it whole, and the update comes back.

The momentum is updated where it is owned. Both ways are one exchange a round, in the dtype of the products. Over tp the
parts of a matrix come together too: what a rank makes orthogonal is never a part.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ckptkit import ParallelLayout
from trainer.config import OptimConfig
from trainer.mesh.layout import Axes, Axis
from trainer.mesh.mesh import ProcessMesh
from trainer.ops import muon, split
from trainer.store.bucket import Bucket
from trainer.store.matrices import Matrix, MatrixPart, MatrixSpan, in_rounds, shared_out, spans_of
from trainer.store.parameter import Parameter

ROUND = 1 << 25  # elements of each rank that travel together
Parts = dict[MatrixPart, Tensor]


@dataclass(frozen=True, slots=True)
class _Spans:
    """Spans rank by rank, as an exchange has them one behind the other, and how many elements are each rank's."""

    spans: Sequence[MatrixSpan]
    sizes: Sequence[int]

    @classmethod
    def of(cls, by_rank: Sequence[Sequence[MatrixSpan]]) -> "_Spans":
        """Return the spans of each rank."""
        sizes = [sum(span.size for span in spans) for spans in by_rank]
        return cls([span for spans in by_rank for span in spans], sizes)


@dataclass(frozen=True, slots=True)
class _Round:
    """Spans of some parameters: what a rank sends and what arrives, then what it returns and what is returned to it."""

    names: Sequence[str]
    sent: _Spans
    arriving: _Spans
    returned: _Spans
    updated: _Spans


@dataclass(frozen=True, slots=True)
class _Live:
    """What a rank updates of one parameter; `start` is where it begins in the rank's part of that."""

    gradient: Tensor
    moment: Tensor
    master: Tensor
    published: Tensor | None
    row: Parameter
    start: int


class MatrixUpdates:
    """The buckets of one group of ranks whose matrices are updated whole; owned by the training thread."""

    def __init__(self, buckets: Sequence[Bucket], table: Mapping[str, Parameter], mesh: ProcessMesh) -> None:
        """Plan all exchanges, from what each rank of the group holds."""
        self._group = group = mesh.along(whole_axes(buckets[0].plan.runs[0].holders, mesh.layout))
        self._table, self._live = table, dict[str, _Live]()
        like = buckets[0].gradients
        self._nothing = like.new_empty(0, dtype=muon.direction_dtype(like.dtype))
        for bucket in buckets:
            for segment in bucket.updated_segments:
                tensors = bucket.tensors(segment, bucket.updated[0], bucket.state)
                [moment] = tensors.states.values()
                self._live[segment.name] = _Live(
                    tensors.gradient, moment, tensors.master, tensors.published, table[segment.name], segment.start
                )
        sizes = {name: math.prod(table[name].shape) for bucket in buckets for name, *_ in bucket.plan.parameters()}
        owned = [self._spans(buckets, mesh, rank, updates=False) for rank in group.ranks]
        updated = [self._spans(buckets, mesh, rank, updates=True) for rank in group.ranks]
        self._rounds = [_planned(names, owned, updated, group.index) for names in in_rounds(sizes, ROUND * group.size)]

    def _spans(self, buckets: Sequence[Bucket], mesh: ProcessMesh, rank: int, *, updates: bool) -> list[MatrixSpan]:
        """Return what a rank owns, or updates, of the matrices."""
        coords, spans = mesh.layout.coords(rank), list[MatrixSpan]()
        for bucket in buckets:
            interval = bucket.owned_by(mesh, rank)
            if updates and not bucket.options.sharded:
                interval = 0, bucket.plan.size(bucket.group.size)
            for segment in bucket.plan.segments(*interval):
                row = self._table[segment.name]
                box = row.placement.local_box(segment.name, row.shape, mesh.layout, coords)
                spans += spans_of(segment.name, row.shape, box, segment.start, segment.stop)
        return spans

    @torch.no_grad()
    def update(self, optim: OptimConfig, lr: float, *, factor: Tensor, is_bad: Tensor) -> None:
        """Make one step of all matrices with the gradients scaled by `factor`; none where `is_bad` is 1."""
        rate = lr * (optim.muon_lr / optim.lr if optim.muon_lr and optim.lr else 1.0)
        for plan in self._rounds:
            directions = {name: _direction(self._live[name], optim, factor, is_bad) for name in self._here(plan)}
            own = [directions[span.part.matrix.name][self._place(span)] for span in plan.sent.spans]
            parts = received_parts(self._exchange(own, plan.sent, plan.arriving), plan.arriving.spans)
            made = {part: values.flatten() for part, values in orthogonal_parts(parts, optim.muon_steps).items()}
            back = [made[span.part][span.start : span.stop] for span in plan.returned.spans]
            updates = self._exchange(back, plan.returned, plan.updated).split(
                [span.size for span in plan.updated.spans]
            )
            for span, values in zip(plan.updated.spans, updates, strict=True):
                directions[span.part.matrix.name][self._place(span)] = values
            for name, values in directions.items():
                _step(self._live[name], optim, rate, values, is_bad)

    def _here(self, plan: _Round) -> list[str]:
        """Return the parameters of a round that this rank has elements of."""
        return [name for name in plan.names if name in self._live]

    def _place(self, span: MatrixSpan) -> slice:
        """Return where a span is in what this rank updates of its parameter."""
        first = span.first - self._live[span.part.matrix.name].start
        return slice(first, first + span.size)

    def _exchange(self, pieces: Sequence[Tensor], to_each: _Spans, from_each: _Spans) -> Tensor:
        """Return what the ranks have for this one, of pieces for each of them."""
        flat = torch.cat([self._nothing, *pieces])
        return self._group.start_exchange(flat, list(to_each.sizes), list(from_each.sizes)).wait()


def matrix_updates(buckets: Sequence[Bucket], table: Mapping[str, Parameter], mesh: ProcessMesh) -> list[MatrixUpdates]:
    """Return the updates of buckets of matrices, one for each group of ranks that hold them."""
    by_axes: dict[Axes, list[Bucket]] = {}
    for bucket in buckets:
        by_axes.setdefault(whole_axes(bucket.plan.runs[0].holders, mesh.layout), []).append(bucket)
    return [MatrixUpdates(some, table, mesh) for some in by_axes.values()]


def whole_axes(holders: Axes, layout: ParallelLayout) -> Axes:
    """Return the axes of the ranks that hold all of a matrix together: those of its holders, and tp, which cuts it.

    Of experts that borrow the ranks of tp, tp cuts none.
    """
    if Axis.EDP in holders:
        return (Axis.EDP,) if layout.etp else (Axis.TP, Axis.EDP)
    return Axis.TP, Axis.CP, Axis.DP


def _planned(
    names: Sequence[str], owned: Sequence[Sequence[MatrixSpan]], updated: Sequence[Sequence[MatrixSpan]], index: int
) -> _Round:
    """Return the round of some parameters for the rank at a place, of the spans of all ranks of the group."""
    order = {name: number for number, name in enumerate(names)}
    matrices = {span.part.matrix for spans in owned for span in spans if span.part.matrix.name in order}
    in_order = sorted(matrices, key=lambda matrix: (order[matrix.name], matrix.expert))
    takers = shared_out(in_order, len(owned))
    members = range(len(owned))

    def between(spans: Sequence[MatrixSpan], rank: int) -> list[MatrixSpan]:
        return [span for span in spans if takers.get(span.part.matrix) == rank]

    return _Round(
        names,
        sent=_Spans.of([between(owned[index], rank) for rank in members]),
        arriving=_Spans.of([between(owned[rank], index) for rank in members]),
        returned=_Spans.of([between(updated[rank], index) for rank in members]),
        updated=_Spans.of([between(updated[index], rank) for rank in members]),
    )


def received_parts(arrived: Tensor, spans: Sequence[MatrixSpan]) -> Parts:
    """Return parts of matrices, put together of the spans that arrived."""
    parts: Parts = {}
    for span, values in zip(spans, arrived.split([span.size for span in spans]), strict=True):
        if span.part not in parts:
            parts[span.part] = arrived.new_empty(math.prod(span.part.shape))
        parts[span.part][span.start : span.stop] = values
    return {part: values.view(part.shape) for part, values in parts.items()}


def orthogonal_parts(parts: Parts, steps: int) -> Parts:
    """Return the same parts of the matrices made orthogonal: each matrix as a whole, those of one shape at once."""
    by_shape: dict[tuple[int, int], dict[Matrix, list[MatrixPart]]] = {}
    for part in parts:
        by_shape.setdefault(part.matrix.shape, {}).setdefault(part.matrix, []).append(part)
    results: Parts = {}
    for shape, of_matrix in by_shape.items():
        whole = next(iter(parts.values())).new_empty(len(of_matrix), *shape)
        for matrix, pieces in zip(whole, of_matrix.values(), strict=True):
            for part in pieces:
                matrix[_rows(part)] = parts[part]
        for matrix, pieces in zip(muon.orthogonal(whole, steps), of_matrix.values(), strict=True):
            results |= {part: matrix[_rows(part)] for part in pieces}
    return results


def _rows(part: MatrixPart) -> tuple[slice, slice]:
    """Return where a part is in its matrix."""
    (top, left), (rows, columns) = part.corner, part.shape
    return slice(top, top + rows), slice(left, left + columns)


def _direction(live: _Live, optim: OptimConfig, factor: Tensor, is_bad: Tensor) -> Tensor:
    gradient = live.gradient * factor.to(live.gradient.dtype)
    return muon.direction(gradient, live.moment, optim.muon_momentum, is_bad=is_bad)


def _step(live: _Live, optim: OptimConfig, rate: float, values: Tensor, is_bad: Tensor) -> None:
    """Step the master of a part, and publish it."""
    rate = rate * live.row.rate
    decay = 1 - rate * optim.weight_decay * live.row.decay
    adjusted = rate * muon.scale_of(optim.muon_scale, *live.row.shape[-2:])
    master = split.whole_master(live.master, live.published)
    muon.step(master, values, decay=decay, rate=adjusted, is_bad=is_bad)
    split.publish(master, live.master, live.published)
