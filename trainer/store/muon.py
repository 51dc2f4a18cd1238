"""Muon over the ranks that hold a matrix: intervals travel to the one that takes it whole, and the update comes back.

The momentum is updated where it is owned. Both ways are one exchange a round, in the dtype of the products. They are
beside the products: a round's directions leave before those of the round before it are made orthogonal, and its updates
come back beside the round behind it. Over tp the parts of a matrix come together too: what a rank makes orthogonal is
never a part. An element is copied twice: from what arrived to its matrix, and from there to what is returned.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ckptkit import ParallelLayout
from trainer.config import OptimConfig
from trainer.mesh.group import Work
from trainer.mesh.layout import Axes, Axis
from trainer.mesh.mesh import ProcessMesh
from trainer.ops import muon
from trainer.store.bucket import Bucket
from trainer.store.matrices import Matrix, MatrixSpan, in_rounds, shared_out, spans_of
from trainer.store.parameter import Parameter
from trainer.store.plan import Segment

ROUND = 1 << 25  # elements of each rank that travel together


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

    @property
    def places(self) -> dict[MatrixSpan, int]:
        """Return where each begins."""
        places, first = dict[MatrixSpan, int](), 0
        for span in self.spans:
            places[span] = first
            first += span.size
        return places


@dataclass(frozen=True, slots=True)
class _Exchanges:
    """Spans of a round: what a rank sends and what arrives, then what it returns and what is returned to it."""

    sent: _Spans
    arriving: _Spans
    returned: _Spans
    updated: _Spans


class _Held(NamedTuple):
    """A span that a rank updates, its elements by their positions in the bucket, and whether the rank owns it."""

    span: MatrixSpan
    segment: Segment
    is_owned: bool


class _Round(NamedTuple):
    """What is exchanged together, what this rank updates of it, and the buckets whose last matrices it has."""

    exchanges: _Exchanges
    table: muon.MuonTable
    buckets: Sequence[Bucket]


class MatrixUpdates:
    """The buckets of one group of ranks whose matrices are updated whole; owned by the training thread."""

    def __init__(
        self, buckets: Sequence[Bucket], table: Mapping[str, Parameter], mesh: ProcessMesh, round_elements: int
    ) -> None:
        """Plan all exchanges, from what each rank of the group holds; about so many elements of it travel together."""
        self._group = group = mesh.along(whole_axes(buckets[0].plan.runs[0].holders, mesh.layout))
        self._like = buckets[0].gradients.new_empty(0, dtype=muon.direction_dtype(buckets[0].gradients.dtype))
        by_rank = [[each for bucket in buckets for each in _held(bucket, table, mesh, rank)] for rank in group.ranks]
        bucket_of = {name: bucket for bucket in buckets for name, *_ in bucket.plan.parameters()}
        sizes, loads = {name: math.prod(table[name].shape) for name in bucket_of}, [0] * group.size
        last_names = {bucket: name for name, bucket in bucket_of.items()}
        self._rounds = list[_Round]()
        for names in in_rounds(sizes, round_elements * group.size):
            exchanges = _planned(names, by_rank, group.index, loads)
            sent, returned = exchanges.sent.places, exchanges.updated.places
            parts = [
                _part(bucket_of[segment.name], segment, table[segment.name], sent.get(span), returned[span])
                for span, segment, _ in by_rank[group.index]
                if span in returned
            ]
            complete = [bucket for bucket in buckets if last_names[bucket] in names]
            self._rounds.append(_Round(exchanges, muon.MuonTable(parts), complete))

    @torch.no_grad()
    def update(
        self, optim: OptimConfig, lr: float, *, factor: Tensor, is_bad: Tensor, form: str = "csrc"
    ) -> Iterator[Bucket]:
        """Make one step of all matrices with the gradients scaled by `factor`, yielding the buckets that are updated.

        Where `is_bad` is 1 none is.
        """
        rate = lr * (optim.muon_lr / optim.lr if optim.muon_lr and optim.lr else 1.0)

        def send(some: _Round) -> Work:
            exchanges, directions = some.exchanges, self._like.new_empty(sum(some.exchanges.sent.sizes))
            some.table.write_directions(directions, optim.muon_momentum, factor=factor, is_bad=is_bad, form=form)
            return self._group.start_exchange(directions, exchanges.sent.sizes, exchanges.arriving.sizes)

        def step(some: _Round, updates: Work) -> Sequence[Bucket]:
            some.table.step(updates.wait(), rate, optim.weight_decay, is_bad=is_bad, form=form)
            return some.buckets

        arriving, returning = send(self._rounds[0]), list[tuple[_Round, Work]]()
        for some, following in zip(self._rounds, [*self._rounds[1:], None], strict=True):
            arrived, spans = arriving.wait(), some.exchanges
            if following is not None:
                arriving = send(following)
            updates = orthogonal_spans(arrived, spans.arriving.spans, spans.returned.spans, optim.muon_steps)
            returning.append((some, self._group.start_exchange(updates, spans.returned.sizes, spans.updated.sizes)))
            if len(returning) > 1:
                yield from step(*returning.pop(0))
        yield from step(*returning.pop())


def matrix_updates(
    buckets: Sequence[Bucket], table: Mapping[str, Parameter], mesh: ProcessMesh, round_elements: int = ROUND
) -> list[MatrixUpdates]:
    """Return the updates of buckets of matrices, one for each group of ranks that hold them."""
    by_axes: dict[Axes, list[Bucket]] = {}
    for bucket in buckets:
        by_axes.setdefault(whole_axes(bucket.plan.runs[0].holders, mesh.layout), []).append(bucket)
    return [MatrixUpdates(some, table, mesh, round_elements) for some in by_axes.values()]


def whole_axes(holders: Axes, layout: ParallelLayout) -> Axes:
    """Return the axes of the ranks that hold all of a matrix together: those of its holders, and tp, which cuts it.

    Of experts that borrow the ranks of tp, tp cuts none.
    """
    if Axis.EDP in holders:
        return (Axis.EDP,) if layout.etp else (Axis.TP, Axis.EDP)
    return Axis.TP, Axis.CP, Axis.DP


def _held(bucket: Bucket, table: Mapping[str, Parameter], mesh: ProcessMesh, rank: int) -> Iterator[_Held]:
    """Yield what a rank updates of the matrices of a bucket: what it owns, and the rest if it updates all."""
    coords, (start, stop) = mesh.layout.coords(rank), bucket.owned_by(mesh, rank)
    intervals = [(start, stop)]
    if not bucket.options.sharded:
        intervals += (0, start), (stop, bucket.plan.size(bucket.group.size))
    for interval in intervals:
        for segment in bucket.plan.segments(*interval):
            row, first = table[segment.name], interval[0] + segment.offset - segment.start
            box = row.placement.local_box(segment.name, row.shape, mesh.layout, coords)
            for span in spans_of(segment.name, row.shape, box, segment.start, segment.stop):
                whole = Segment(segment.name, span.first, span.first + span.size, first + span.first)
                yield _Held(span, whole, interval == (start, stop))


def _part(bucket: Bucket, segment: Segment, row: Parameter, sent: int | None, returned: int) -> muon.MuonPart:
    """Return what an update takes of the elements of a bucket."""
    live = bucket.tensors(segment, 0, bucket.state)
    [moment] = live.states.values()
    scale = muon.scale_of(bucket.options.muon_scale, *row.shape[-2:])
    places, factors = (sent, returned), (row.rate, row.decay, scale)
    return muon.MuonPart(live.gradient, moment, live.master, live.published, *places, *factors)


def _planned(names: Sequence[str], by_rank: Sequence[Sequence[_Held]], index: int, loads: list[int]) -> _Exchanges:
    """Return the exchanges of some parameters for the rank at a place, of what all ranks of the group hold.

    Who has had less to do in the rounds before takes more; that is counted.
    """
    order, members = {name: number for number, name in enumerate(names)}, range(len(by_rank))
    matrices = {each.span.part.matrix for some in by_rank for each in some if each.segment.name in order}
    takers = shared_out(sorted(matrices, key=lambda matrix: (order[matrix.name], matrix.expert)), loads)

    def between(rank: int, taker: int, *, owned: bool = False) -> list[MatrixSpan]:
        some = (each.span for each in by_rank[rank] if each.is_owned or not owned)
        return [span for span in some if takers.get(span.part.matrix) == taker]

    return _Exchanges(
        sent=_Spans.of([between(index, rank, owned=True) for rank in members]),
        arriving=_Spans.of([between(rank, index, owned=True) for rank in members]),
        returned=_Spans.of([between(rank, index) for rank in members]),
        updated=_Spans.of([between(index, rank) for rank in members]),
    )


def orthogonal_spans(
    arrived: Tensor, arriving: Sequence[MatrixSpan], returned: Sequence[MatrixSpan], steps: int
) -> Tensor:
    """Return spans of matrices made orthogonal, one behind the other, of all spans of these that arrived.

    Each matrix is taken as a whole, and those of one shape at once.
    """
    results = arrived.new_empty(sum(span.size for span in returned))
    numbers: dict[tuple[int, int], dict[Matrix, int]] = {}
    for span in arriving:
        of_shape = numbers.setdefault(span.part.matrix.shape, {})
        of_shape.setdefault(span.part.matrix, len(of_shape))
    for shape, of_shape in numbers.items():
        whole = arrived.new_empty(len(of_shape), *shape)
        for matrices, values in _views(whole, of_shape, arrived, arriving):
            matrices.copy_(values)
        whole = muon.orthogonal(whole, steps)
        for matrices, values in _views(whole, of_shape, results, returned):
            values.copy_(matrices)
    return results


def _views(
    whole: Tensor, numbers: Mapping[Matrix, int], values: Tensor, spans: Sequence[MatrixSpan]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield rectangles of some matrices by their numbers, and the same elements of spans one behind the other."""
    for span, own in zip(spans, values.split([span.size for span in spans]), strict=True):
        for first, rows, columns in span.rectangles if span.part.matrix in numbers else ():
            rectangle = whole[numbers[span.part.matrix], rows, columns]
            yield rectangle, own[first : first + rectangle.numel()].view(rectangle.shape)
