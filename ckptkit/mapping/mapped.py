"""Mapped: one tensor of a mapping's output and the rows of the source that it is made of. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ckptkit.mapping.rules import Fill, Fuse, Grow, Split
from ckptkit.model.chunk_table import ChunkTable, TensorColumns, ramps
from ckptkit.model.tensor import TensorInfo
from ckptkit.plan.stored import StoredChunks

FLOATS = ("F64", "F32", "F16", "BF16")  # of which a mean is made


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows [first, stop) of a tensor of the source; a scalar is one row."""

    source: TensorInfo
    first: int
    stop: int

    @classmethod
    def whole(cls, source: TensorInfo) -> "RowRange":
        """Return all rows."""
        return cls(source, 0, num_rows(source))

    def __str__(self) -> str:
        name = self.source.name
        return name if self == RowRange.whole(self.source) else f"{name}[{self.first}:{self.stop}]"


@dataclass(frozen=True, slots=True)
class Mapped:
    """One tensor of the output and the rows that it is made of; `fill` is what further rows hold, or their bytes."""

    info: TensorInfo
    ranges: tuple[RowRange, ...]
    layer: int | None = None  # of the output, if layers were put into order
    fill: Fill | bytes | None = None

    @property
    def is_same(self) -> bool:
        """Whether nothing changes."""
        return self.ranges == (RowRange.whole(self.info),)

    @property
    def num_rows(self) -> int:
        """Rows that come from the source."""
        return sum(each.stop - each.first for each in self.ranges)

    @property
    def made_of(self) -> str:
        """Its ranges, for people."""
        return " + ".join(map(str, self.ranges))

    def rows(self, first: int, stop: int) -> Iterator[RowRange]:
        """Yield what the rows [first, stop) are made of."""
        at = 0
        for each in self.ranges:
            begin, end = max(first - at, 0), min(stop - at, each.stop - each.first)
            if begin < end:
                yield replace(each, first=each.first + begin, stop=each.first + end)
            at += each.stop - each.first


def num_rows(info: TensorInfo) -> int:
    """Return the length of the first dim; a scalar is one row."""
    return info.shape[0] if info.shape else 1


def shown(info: TensorInfo) -> str:
    """Return a tensor for people."""
    return f"{info.name} {info.dtype} {list(info.shape)}"


def why_not_split(info: TensorInfo, rule: Split) -> str:
    """Return why a tensor cannot be split so, empty if it can."""
    rows, num_parts, is_scalar = num_rows(info), len(rule.to), not info.shape
    sizes = rule.sizes(rows)
    faults = {
        f"is tied to {info.placement.tied_to}": info.placement.tied_to is not None,
        f"has not the rows {list(rule.rows)} for {num_parts} parts": (
            rule.rows and not is_scalar and (len(rule.rows) != num_parts or sum(rule.rows) != rows)
        ),
        f"cannot be cut into {num_parts} parts of {rule.groups} equal groups": (
            not is_scalar and (sum(sizes) != rows or any(size % rule.groups for size in sizes))
        ),
    }
    return _first_of(faults)


def _first_of(faults: Mapping[str, object]) -> str:
    """Return the first fault that there is, empty without one."""
    return next((fault for fault, is_there in faults.items() if is_there), "")


def parts_of(tensor: Mapped, rule: Split) -> Iterator[Mapped]:
    """Yield the parts of a tensor: of each group of its rows, one run of rows after the other; a scalar is in each."""
    info, num_groups = tensor.info, rule.groups
    rows, words = num_rows(info), rule.tensors.words_of(info.name) or {}
    if not info.shape:
        yield from (replace(tensor, info=replace(info, name=to.filled(words))) for to in rule.to)
        return
    at = 0
    for to, size in zip(rule.to, rule.sizes(rows), strict=True):
        length = size // num_groups
        starts = [group * (rows // num_groups) + at for group in range(num_groups)]
        ranges = joined(part for start in starts for part in tensor.rows(start, start + length))
        yield replace(tensor, info=replace(info, name=to.filled(words), shape=(size, *info.shape[1:])), ranges=ranges)
        at += length


def why_not_fused(parts: Sequence[Mapped], rule: Fuse) -> str:
    """Return why tensors cannot be fused so, empty if they can."""
    infos = [part.info for part in parts]
    kinds = {(info.dtype, info.shape[1:], info.placement.stage) for info in infos}
    return _first_of(
        {
            "one is tied or has no rows": not all(info.shape and info.placement.tied_to is None for info in infos),
            "dtypes, columns or stages differ": len(kinds) > 1,
            f"the rows of one are not {rule.groups} equal groups": any(num_rows(info) % rule.groups for info in infos),
        }
    )


def why_not_grown(tensor: Mapped, rule: Grow) -> str:
    """Return why a tensor cannot grow so, empty if it can."""
    info = tensor.info
    return _first_of(
        {
            "is matched by two of them": tensor.fill is not None,
            f"cannot have {rule.rows} rows": not info.shape or info.shape[0] > rule.rows,
            "has no mean": rule.fill == "mean" and (info.dtype not in FLOATS or info.shape[:1] == (0,)),
        }
    )


def fused(name: str, parts: Sequence[Mapped], num_groups: int) -> Mapped:
    """Return what parts become: of each group of its rows, those of one part after the other; cut as the first part."""
    ranges, first = list[RowRange](), parts[0].info
    for group in range(num_groups):
        for part in parts:
            length = num_rows(part.info) // num_groups
            ranges += part.rows(group * length, (group + 1) * length)
    rows = sum(num_rows(part.info) for part in parts)
    return replace(parts[0], info=replace(first, name=name, shape=(rows, *first.shape[1:])), ranges=joined(ranges))


def joined(ranges: Iterable[RowRange]) -> tuple[RowRange, ...]:
    """Return ranges with neighbours of one tensor made one."""
    neighbours: list[RowRange] = []
    for rows in ranges:
        if neighbours and (neighbours[-1].source, neighbours[-1].stop) == (rows.source, rows.first):
            neighbours[-1] = replace(neighbours[-1], stop=rows.stop)
        else:
            neighbours.append(rows)
    return tuple(neighbours)


def moved(stored: StoredChunks, tensors: TensorColumns, ranges: Sequence[tuple[int, int, RowRange]]) -> StoredChunks:
    """Return what is stored of each range of rows, as rows of the tensor of that number, from `at` on."""
    sources = [stored.chunks.tensors.numbers[part.source.name] for _, _, part in ranges]
    begin = np.searchsorted(stored.chunks.tensor, sources, "left")
    counts = np.searchsorted(stored.chunks.tensor, sources, "right") - begin
    source_chunks = stored.take(ramps(begin, counts))
    numbers = [(number, at, part.first, part.stop) for number, at, part in ranges]
    number, at, first, stop = np.repeat(np.array(numbers, np.int64).reshape(-1, 4), counts, axis=0).T
    chunks = source_chunks.chunks.with_dims(max(source_chunks.chunks.offset.shape[1], 1))
    row = np.arange(len(chunks)), chunks.offset.shape[1] - np.maximum(tensors.num_dims[number], 1)  # the first dim's
    offset, shape, length = chunks.offset.copy(), chunks.shape.copy(), chunks.shape[row]
    low = np.clip(first - offset[row], 0, length)  # the rows of the box that are in the range: [low, high)
    high = np.clip(stop - offset[row], low, length)
    width = shape.prod(axis=1) // np.maximum(length, 1)
    offset[row] += low + at - first
    shape[row] = high - low
    before = low * width
    begins, ends = (np.clip(bound - before, 0, shape[row] * width) for bound in (chunks.start, chunks.stop))
    skipped = np.maximum(before - chunks.start, 0) * tensors.itemsize[number]
    table = ChunkTable(tensors, number, offset, shape, begins, ends)
    is_kept = (begins < ends) | (high - low == length)
    return StoredChunks(table, source_chunks.part, source_chunks.offset + skipped).take(np.flatnonzero(is_kept))
