"""Which parameters of a rank share a buffer, who holds copies of it, and who owns which part: pure arithmetic.

A parameter's bucket belongs to the group of exactly the ranks that hold a copy, its holders. The bucket is cut into as
many equal intervals as there are holders, and each owns one (Rajbhandari et al., 2020, over all holders): gradients are
summed into the owner, the owner updates, all take the result. For example with tp 2 and dp 2 a norm of 2048 elements
has four holders, each the owner of 512, and a matrix that tp cuts has two, each the owner of half of its rows there.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckptkit import bucket_offsets, padded_size, shard_interval
from trainer.mesh.layout import Axes, Axis

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ParameterRun:
    """Parameters that lie in one piece and are one matrix for the arithmetic: q, k and v, or one parameter alone."""

    shapes: Mapping[str, Shape]
    unit: str
    holders: Axes
    optimizer: str = "adamw"

    @property
    def names(self) -> tuple[str, ...]:
        """Return the parameters' names, in the order of their rows."""
        return tuple(self.shapes)

    @property
    def shape(self) -> Shape:
        """Return the shape of the whole: the rows of all parameters, one below the other."""
        first = next(iter(self.shapes.values()))
        return (sum(shape[0] for shape in self.shapes.values()), *first[1:])

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Segment:
    """The elements [start, stop) of one parameter, and where the first of them is in an interval of its bucket."""

    name: str
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """Runs of one unit, group of holders and optimizer in one buffer, each at a 64-byte aligned offset."""

    runs: tuple[ParameterRun, ...]
    itemsize: int

    @property
    def offsets(self) -> list[int]:
        """Return the offset of each run."""
        return self._offsets_and_total()[0]

    def size(self, num_holders: int) -> int:
        """Return the number of elements, padded so that the holders divide it."""
        return padded_size(self._offsets_and_total()[1], num_holders, self.itemsize)

    def interval(self, num_holders: int, index: int) -> tuple[int, int]:
        """Return the positions [start, stop) that a holder owns."""
        return shard_interval(self._offsets_and_total()[1], num_holders, index, self.itemsize)

    def gaps(self, num_holders: int) -> list[tuple[int, int]]:
        """Return the positions [start, stop) between runs, and behind the last, that no parameter has."""
        ends = [offset + run.numel for offset, run in zip(self.offsets, self.runs, strict=True)]
        begins = [*self.offsets[1:], self.size(num_holders)]
        return [(end, begin) for end, begin in zip(ends, begins, strict=True) if end < begin]

    def parameters(self) -> Iterable[tuple[str, Shape, int]]:
        """Yield each parameter's name, shape and offset; inside a run there are no gaps."""
        for run, offset in zip(self.runs, self.offsets, strict=True):
            for name, shape in run.shapes.items():
                yield name, shape, offset
                offset += math.prod(shape)

    def is_cut(self, num_holders: int, num_inner: int, whole_bytes: int) -> bool:
        """Return whether the inner ones of all holders may keep an interval each, and lease the whole for a pass.

        They may not for what has less than so many bytes, nor for what two stages hold, which are at different passes.
        """
        size_bytes = self.size(num_holders) * self.itemsize
        return num_inner > 1 and size_bytes >= whole_bytes and Axis.ENDS not in self.runs[0].holders

    def segments(self, start: int, stop: int) -> list[Segment]:
        """Return what the interval [start, stop) has of each parameter."""
        found = []
        for name, shape, offset in self.parameters():
            first, last = max(offset, start), min(offset + math.prod(shape), stop)
            if first < last:
                found.append(Segment(name, first - offset, last - offset, first - start))
        return found

    def _offsets_and_total(self) -> tuple[list[int], int]:
        return bucket_offsets([run.numel for run in self.runs], self.itemsize)


def plan_runs(
    shapes: Mapping[str, Shape], fused: Iterable[Sequence[str]], unit_of: Mapping[str, str], holders: Mapping[str, Axes]
) -> list[ParameterRun]:
    """Return the parameters in their order as runs; those of a fused group come where its first one is."""
    group_of = {name: tuple(group) for group in fused for name in group}
    runs, taken = [], set[str]()
    for name in shapes:
        names = group_of.get(name, (name,))
        if name not in taken:
            taken |= set(names)
            runs.append(ParameterRun({each: shapes[each] for each in names}, unit_of[name], holders[name]))
    return runs


def plan_buckets(runs: Sequence[ParameterRun], bytes_each: int, itemsize: int) -> list[BucketPlan]:
    """Group runs, in order, into buckets of at most `bytes_each` (a larger run has one of its own).

    No bucket spans two units, two groups of holders or two optimizers.
    """
    buckets: dict[tuple[str, Axes, str], list[list[ParameterRun]]] = {}
    for run in runs:
        parts = buckets.setdefault((run.unit, run.holders, run.optimizer), [[]])
        filled = sum(each.numel for each in parts[-1]) * itemsize
        if parts[-1] and filled + run.numel * itemsize > bytes_each:
            parts.append([])
        parts[-1].append(run)
    return [BucketPlan(tuple(part), itemsize) for parts in buckets.values() for part in parts]
