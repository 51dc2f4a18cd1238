"""Diff: how the tensors of two checkpoints differ, whatever their layouts and dtypes, in one streaming pass over both.

Elements are equal if their bits are: -0.0 is not 0.0, and a NaN equals one of the same bits. Those of other dtypes are
compared once widened. Memory: four slabs of 32 MiB, some MiB a thread, one granule of each open file, and what the
readers hold of all part indexes; it does not grow with the tensors.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np

from ckptkit.check.elements import BLOCK_ELEMENTS, Floats, Numbers, bits, l2_norm, widened
from ckptkit.check.slabs import AHEAD_SLAB_BYTES, Source, chosen, holder_of, read_ahead
from ckptkit.format.root import Root
from ckptkit.io.blocks import Bytes
from ckptkit.loading.chunk_source import ChunkSource, reading_threads, usual_threads
from ckptkit.model.slab import Slab
from ckptkit.model.tensor import ITEMSIZE, TensorInfo

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far two elements may be apart: by an absolute or a relative difference up to these, as in `math.isclose`."""

    relative: float = 0.0
    absolute: float = 0.0


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest value, a NaN before all others, and the row-major position of the first element that has it."""

    value: float
    position: int


@dataclass(frozen=True, slots=True)
class Difference:
    """How elements differ: how many do, by how much at most, both L2 norms and that of the difference.

    A relative difference is the absolute one by the larger magnitude of the two. With a tolerance, elements within it
    neither count nor are the largest.
    """

    num_differing: int = 0
    absolute: Largest | None = None
    relative: Largest | None = None
    left_norm: float = 0.0
    right_norm: float = 0.0
    norm: float = 0.0

    def __add__(self, other: "Difference") -> "Difference":
        """Return the difference of these elements and those of `other`, which follow them."""
        return Difference(
            self.num_differing + other.num_differing,
            _larger(self.absolute, other.absolute),
            _larger(self.relative, other.relative),
            math.hypot(self.left_norm, other.left_norm),
            math.hypot(self.right_norm, other.right_norm),
            math.hypot(self.norm, other.norm),
        )

    @property
    def relative_norm(self) -> float:
        """The norm of the difference by the larger one of both norms: how much tensors differ as a whole."""
        return self.norm / max(self.left_norm, self.right_norm) if self.norm else 0.0


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """How a tensor that both checkpoints hold in one shape differs; dtypes are those of the left and the right one."""

    name: str
    dtypes: Pair
    shape: tuple[int, ...]
    found: Difference
    is_equal: bool

    def index(self, largest: Largest | None) -> list[int] | None:
        """Return where in the tensor a largest difference is."""
        return None if largest is None else [int(place) for place in np.unravel_index(largest.position, self.shape)]

    @property
    def rank(self) -> tuple[bool, float, str]:
        """Sort key: the tensors that differ most come first, before all others those whose norm is NaN."""
        by = self.found.relative_norm
        return self.is_equal, -math.inf if math.isnan(by) else -by, self.name


@dataclass(frozen=True)
class CheckpointDifference:
    """How two checkpoints differ: tensors in one only, of other shapes, and those compared, most different first.

    `facts` are step, layout and metadata with other values, by name; they are no difference of tensors.
    """

    only_left: tuple[str, ...]
    only_right: tuple[str, ...]
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    tensors: tuple[TensorDifference, ...]
    facts: Mapping[str, tuple[Any, Any]]

    @property
    def differing(self) -> tuple[TensorDifference, ...]:
        """Those compared that are not equal."""
        return tuple(each for each in self.tensors if not each.is_equal)

    @property
    def is_equal(self) -> bool:
        """Whether both hold the same tensors."""
        return not (self.only_left or self.only_right or self.shapes or self.differing)


def diff_checkpoints(
    left: ChunkSource,
    right: ChunkSource,
    *,
    only: Sequence[str] = (),
    tolerance: Tolerance | None = None,
    slab_bytes: int = AHEAD_SLAB_BYTES,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> CheckpointDifference:
    """Compare the tensors of two checkpoints, those that fit a pattern of `only` where there is one.

    Another dtype is a difference, unless a tolerance is given: then values alone are compared. UserError if a
    checkpoint is one node's part of a step. `progress` is called with the bytes done and the total.
    """
    readers = left, right
    for reader in readers:
        reader.root.check_whole(reader.url)
    lefts, rights = chosen((left.root, right.root), only)
    common = [name for name in lefts if name in rights]
    shapes = {n: (lefts[n].shape, rights[n].shape) for n in common if lefts[n].shape != rights[n].shape}
    compared = [name for name in common if name not in shapes and not _is_seen_elsewhere(name, lefts, rights)]
    sources = [
        Source(reader, {name: holder_of(table[name], reader.root) for name in compared})
        for reader, table in zip(readers, (lefts, rights), strict=True)
    ]
    wide = [_wider(name, *(source.holders[name] for source in sources)) for name in compared]
    total, done = sum(info.size_bytes for info in wide), 0
    totals = dict.fromkeys(compared, Difference())
    with reading_threads(usual_threads() + len(readers), *readers) as pool:
        for slab, data in read_ahead(pool, sources, wide, slab_bytes):
            name = slab.info.name
            dtypes = sources[0].holders[name].dtype, sources[1].holders[name].dtype
            totals[name] = reduce(Difference.__add__, _blocks(pool, slab, data, dtypes, tolerance), totals[name])
            done += slab.size_bytes
            progress(done, total)
    tensors = [
        TensorDifference(
            name, (dtypes := (lefts[name].dtype, rights[name].dtype)), lefts[name].shape, each,
            not each.num_differing and (dtypes[0] == dtypes[1] or tolerance is not None),
        )
        for name, each in totals.items()
    ]  # fmt: skip
    return CheckpointDifference(
        tuple(sorted(lefts.keys() - rights.keys())), tuple(sorted(rights.keys() - lefts.keys())), shapes,
        tuple(sorted(tensors, key=lambda tensor: tensor.rank)), differing_facts(left.root, right.root),
    )  # fmt: skip


def compare(data: Sequence[Bytes], dtypes: Pair, start: int, tolerance: Tolerance | None) -> Difference:
    """Return how two ranges of elements differ, whose first one is at position `start` of their tensor."""
    with np.errstate(all="ignore"):
        left = widened(data[0], dtypes[0])
        if dtypes[0] == dtypes[1]:
            is_other = bits(data[0], dtypes[0]) != bits(data[1], dtypes[1])
            if not is_other.any():
                norm = l2_norm(_floats(left))
                return Difference(left_norm=norm, right_norm=norm)
            right = widened(data[1], dtypes[1])
        else:
            right = widened(data[1], dtypes[1])
            if left.dtype != right.dtype:
                left, right = _floats(left), _floats(right)
            is_other = left.view(np.uint64) != right.view(np.uint64)
        norms = l2_norm(_floats(left)), l2_norm(_floats(right))
        at, same = np.flatnonzero(is_other), np.flatnonzero(~is_other)
        if len(at) < len(same):
            left, right, same = left[at], right[at], same[:0]
        else:  # picking elements would cost more than calculating a few in vain
            at = np.arange(len(left))
        absolute, relative = _distances(left, right)
        absolute[same] = 0
        norm = l2_norm(absolute)
        absolute[same] = relative[same] = -1  # never the largest
        num_differing = len(at) - len(same)
        if tolerance is not None:
            beyond = ~((absolute <= tolerance.absolute) | (relative <= tolerance.relative))
            at, absolute, relative = at[beyond], absolute[beyond], relative[beyond]
            num_differing = len(at)
        if not num_differing:
            return Difference(0, None, None, *norms, norm)
        at += start
        return Difference(num_differing, _largest(absolute, at), _largest(relative, at), *norms, norm)


def differing_facts(left: Root, right: Root) -> dict[str, tuple[Any, Any]]:
    """Return what two roots record with other values: step, layout, layers and metadata, None where one has nothing."""
    facts, others = (
        dict(_flat(root.metadata)) | {"step": root.step, "layout": str(root.layout), "num_layers": root.num_layers}
        for root in (left, right)
    )
    return {
        name: (facts.get(name), others.get(name))
        for name in sorted(facts.keys() | others.keys())
        if facts.get(name) != others.get(name)
    }


def _is_seen_elsewhere(name: str, left: Mapping[str, TensorInfo], right: Mapping[str, TensorInfo]) -> bool:
    """Return whether a tensor is tied in both checkpoints to one that is compared anyway."""
    tied_to = left[name].placement.tied_to
    return tied_to is not None and tied_to == right[name].placement.tied_to and tied_to in left and tied_to in right


def _wider(name: str, left: TensorInfo, right: TensorInfo) -> TensorInfo:
    """Return the row of a tensor that is read from both: of the two that hold its bytes the one of more bytes."""
    return replace(max(left, right, key=lambda info: ITEMSIZE[info.dtype]), name=name)


def _blocks(
    pool: ThreadPoolExecutor, slab: Slab, data: Sequence[Bytes], dtypes: Pair, tolerance: Tolerance | None
) -> list[Difference]:
    """Return the differences of the blocks of a slab, in their order."""
    sizes = [ITEMSIZE[dtype] for dtype in dtypes]

    def compare_block(start: int) -> Difference:
        stop = start + BLOCK_ELEMENTS
        part = [each[start * size : stop * size] for each, size in zip(data, sizes, strict=True)]
        return compare(part, dtypes, slab.start + start, tolerance)

    starts = range(0, slab.stop - slab.start, BLOCK_ELEMENTS)
    return list(map(compare_block, starts) if len(starts) == 1 else pool.map(compare_block, starts))


def _floats(numbers: Numbers) -> Floats:
    return numbers.astype(np.float64, copy=False)


def _distances(left: Numbers, right: Numbers) -> tuple[Floats, Floats]:
    """Return the absolute and the relative difference of each two elements, NaN where one of them is."""
    if left.dtype == np.int64:  # modulo 2**64, so that no difference overflows
        absolute = _floats(np.maximum(left, right).view(np.uint64) - np.minimum(left, right).view(np.uint64))
    else:
        absolute = np.abs(left - right)
    scale = np.maximum(np.abs(_floats(left)), np.abs(_floats(right)))
    scale[scale == 0] = 1
    relative = absolute / scale
    if not math.isfinite(absolute.max(initial=0)):
        relative[np.isinf(absolute)] = np.inf
    return absolute, relative


def _largest(values: Floats, positions: Any) -> Largest:
    at = int(np.argmax(values))  # the first NaN, if there is one
    return Largest(float(values[at]), int(positions[at]))


def _larger(first: Largest | None, second: Largest | None) -> Largest | None:
    """Return the larger of two, the first one if they are equal or it is NaN."""
    if first is None or second is None:
        return first or second
    return first if math.isnan(first.value) or not (second.value > first.value or math.isnan(second.value)) else second


def _flat(value: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return the values of nested dicts by dotted names."""
    found: list[tuple[str, Any]] = []
    for key, item in value.items():
        found += _flat(item, f"{prefix}{key}.") if isinstance(item, Mapping) else [(f"{prefix}{key}", item)]
    return found
