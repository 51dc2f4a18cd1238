"""Cover: whether the chunks of a step hold each element of each tensor exactly once. Pure: no disk.

The first p row-major positions of a box are one box a dim at most, so a chunk is a sum of boxes: those up to `stop`
less those up to `start`. A box weighs the product over its dims of H(high) - H(low), modulo 2^64, where H is a random
function. Boxes that tile a tensor add up to the tensor's own weight; others of as many elements do so with a
probability below 2^-50 in up to 3 dims, 2^-30 in 8 (a hole is an odd term of the sum, and each dim costs 6 bits). So a
part index is weighed when it is read and not kept: O(chunks) time, O(tensors) memory. Only tensors that fail are
searched, for what is missing or double. The chunks of one node's share make up no tensor: they are compared in pairs.
"""

import math
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckptkit.format.keys import named_writers
from ckptkit.format.part_index import PartIndex
from ckptkit.model.chunk_table import ChunkTable, Ints, ramps, row_major_strides
from ckptkit.model.tensor import ITEMSIZE, TensorInfo
from ckptkit.plan.certificate import Certificate, TensorSums
from ckptkit.plan.stored import PartJoin, StoredChunks
from threefold.errors import CheckFailed, listed

Weights = npt.NDArray[np.uint64]
Parts = Callable[[], Iterable[tuple[int, PartIndex]]]  # all part indexes of a step, each with its writer's number
MAX_SEARCHED, MAX_REGIONS = 16, 64  # faulty tensors that are searched, and regions that are found in each
PAIRS_AT_ONCE = 1 << 15
HINT = "let exactly one rank pass each element: where several hold a copy, one of them"


@dataclass(frozen=True)
class CoverFault:
    """One tensor that is not held exactly once, and how."""

    tensor: str
    what: str

    def __str__(self) -> str:
        return f"{self.tensor}: {self.what}"


class Cover:
    """What part indexes hold of the tensors of a table; several threads may add indexes.

    Tied tensors are to be held by no part. With `is_share` the indexes are those of one node of several: elements may
    be missing then, and none may be there twice.
    """

    def __init__(self, tensors: Sequence[TensorInfo], *, is_share: bool = False) -> None:
        self._tensors, self._is_share = tensors, is_share
        self._join = PartJoin(tensors)
        whole = ChunkTable.whole(self._join.tensors)
        self._whole = whole.with_dims(max(whole.offset.shape[1], 1))
        self._is_tied = np.array([info.placement.tied_to is not None for info in tensors], bool)
        self._keys = [np.uint64(secrets.randbits(64)) for _ in range(self._whole.offset.shape[1])]
        self._lock = threading.Lock()
        self._num_held = np.zeros(len(tensors), np.int64)
        self._weight = np.zeros(len(tensors), np.uint64)
        self._leaves_shape = np.zeros(len(tensors), bool)
        self._share: list[StoredChunks] = []
        self._sums = TensorSums(tensors)

    def add(self, index: PartIndex, where: str) -> None:
        """Weigh what a part holds; CheckFailed where its index, which is at `where`, does not fit the table."""
        stored = self._join.of(0, index, where)
        chunks = self._with_elements(stored.chunks)
        weight = weights(chunks, self._keys)
        with self._lock:
            self._leaves_shape[chunks.tensor[self._is_outside(chunks)]] = True
            np.add.at(self._num_held, chunks.tensor, chunks.stop - chunks.start)
            np.add.at(self._weight, chunks.tensor, weight)
            if self._is_share:
                self._share.append(stored)
            self._sums.add(self._join.numbers(index.chunks.tensors, where), index.sums)

    @property
    def certificate(self) -> Certificate | None:
        """The certificate of what the indexes hold, which they hold once; None where one lacks sums, or for a share."""
        return None if self._is_share else self._sums.certificate()

    def check(self, what: str, parts: Parts) -> None:
        """CheckFailed names `what`, and what of which tensors is missing or double in it."""
        if faults := self.faults(parts):
            text = f"{what} does not hold each element of each tensor exactly once:{listed([*map(str, faults)])}"
            raise CheckFailed(text, hint=HINT)

    def faults(self, parts: Parts) -> list[CoverFault]:
        """Return what is wrong with each tensor that is not held exactly once.

        `parts` is called only if there is one.
        """
        faulty = self._faulty()
        if not len(faulty):
            return []
        searched, held = faulty[:MAX_SEARCHED], []
        for writer, index in parts():
            stored = self._join.of(writer, index, f"the index of writer {writer}")
            held.append(stored.take(np.flatnonzero(np.isin(stored.chunks.tensor, searched))))
        joined = self._join.joined(held)
        faults = [(tensor, self._searched(tensor, joined)) for tensor in searched.tolist()]
        faults += [(tensor, f"{self._held(tensor)}, not each once") for tensor in faulty[MAX_SEARCHED:].tolist()]
        return [CoverFault(self._tensors[tensor].name, what) for tensor, what in faults]

    def _with_elements(self, chunks: ChunkTable) -> ChunkTable:
        """Return the chunks that hold elements, in boxes of the table's number of dims."""
        return chunks.take(np.flatnonzero(chunks.start < chunks.stop)).with_dims(self._whole.offset.shape[1])

    def _is_outside(self, chunks: ChunkTable) -> npt.NDArray[np.bool_]:
        outside: npt.NDArray[np.bool_] = np.any(chunks.offset + chunks.shape > self._whole.shape[chunks.tensor], axis=1)
        return outside

    def _faulty(self) -> Ints:
        """Return the numbers of the tensors that are not held as they should be."""
        faulty = self._leaves_shape.copy()
        faulty[self._is_tied & (self._num_held > 0)] = True
        if self._is_share:
            faulty[_held_twice(self._with_elements(self._join.joined(self._share).chunks))] = True
        else:
            weight = box_weights(self._whole, self._keys)
            faulty[~self._is_tied & (self._num_held != self._whole.stop)] = True
            faulty[~self._is_tied & (self._weight != weight)] = True
        return np.flatnonzero(faulty)

    def _held(self, tensor: int) -> str:
        size_bytes = int(self._num_held[tensor]) * ITEMSIZE[self._tensors[tensor].dtype]
        return f"{size_bytes:,} of {self._tensors[tensor].size_bytes:,} bytes are stored"

    def _searched(self, tensor: int, joined: StoredChunks) -> str:
        """Return what is wrong with a faulty tensor, given its chunks among others."""
        info = self._tensors[tensor]
        stored = joined.take(np.flatnonzero(joined.chunks.tensor == tensor))
        chunks, writers = self._with_elements(stored.chunks), stored.part[stored.chunks.start < stored.chunks.stop]
        if info.placement.tied_to is not None:
            return f"{self._held(tensor)}, though it is tied to {info.placement.tied_to}" + _by(writers)
        outside = np.flatnonzero(self._is_outside(chunks))
        if len(outside):
            first = chunks.box(int(outside[0]))
            end = [a + n for a, n in zip(first.offset, first.shape, strict=True)]
            return f"{_span(first.offset, end)} is stored of shape {list(info.shape)}" + _by(writers[outside])
        regions, texts = list(self._wrong_regions(tensor, chunks)), []
        for is_double, what in ((False, "missing"), (True, "stored more than once")):
            some = [region for region in regions if bool(len(region.rows)) == is_double]
            if some:
                num_bytes = sum(region.numel for region in some) * ITEMSIZE[info.dtype]
                least = "at least " if len(regions) == MAX_REGIONS else ""
                skip = len(some[0].low) - len(info.shape)
                span = _span(some[0].low[skip:].tolist(), some[0].high[skip:].tolist())
                by = _by(writers[some[0].rows])
                texts.append(f"{least}{num_bytes:,} of {info.size_bytes:,} bytes are {what}, first {span}{by}")
        return "; ".join(texts)

    def _wrong_regions(self, tensor: int, chunks: ChunkTable) -> Iterator["_Region"]:
        """Yield the first regions of a tensor that no chunk holds, or that several do; in a share those alone.

        What is wrong is halved at the bounds of the boxes in it, until each of them fills what is left.
        """
        boxes = _Boxes.of(chunks)
        num_found, waiting = 0, [(self._whole.offset[tensor], self._whole.shape[tensor])]
        while waiting and num_found < MAX_REGIONS:
            low, high = waiting.pop()
            inside = boxes.clipped(low, high)
            if self._is_sound(inside, low, high):
                continue
            dim, at = inside.middle_bound(low, high)
            if dim >= 0:
                lower_end, upper_begin = high.copy(), low.copy()
                lower_end[dim] = upper_begin[dim] = at
                waiting += [(upper_begin, high), (low, lower_end)]
                continue
            rows = np.flatnonzero(np.bincount(inside.row, inside.sign, len(chunks)))
            if len(rows) > 1 or not self._is_share:
                num_found += 1
                yield _Region(low, high, rows)

    def _is_sound(self, inside: "_Boxes", low: Ints, high: Ints) -> bool:
        """Return whether a region holds nothing wrong, given the boxes in it."""
        if self._is_share:
            return len(np.unique(inside.row)) < 2
        whole = _weight(low[:, None], high[:, None], self._keys)
        return int((inside.sign * inside.numel).sum()) == math.prod((high - low).tolist()) and bool(
            inside.weight(self._keys).sum() == whole[0]
        )


@dataclass(frozen=True, eq=False)
class _Region:
    """A box [low, high) and the chunks, by row, that hold it."""

    low: Ints
    high: Ints
    rows: Ints

    @property
    def numel(self) -> int:
        return math.prod((self.high - self.low).tolist())


@dataclass(frozen=True, eq=False)
class _Boxes:
    """Boxes low[D, M] to high[D, M], to be added (sign 1) or taken away (-1), and the chunk that each is a part of."""

    low: Ints
    high: Ints
    sign: Ints
    row: Ints

    @classmethod
    def of(cls, chunks: ChunkTable) -> "_Boxes":
        """2 D boxes a chunk, for each chunk at the same places: M = 2 D N, chunks counting fastest.

        In 2 dims positions [0, 23) of a box of 10 columns are rows [0, 2) and columns [0, 3) of row 2.
        """
        num_chunks, num_dims = chunks.offset.shape
        strides = row_major_strides(chunks.shape)
        low = np.empty((num_dims, 2, num_dims, num_chunks), np.int64)
        high = np.empty_like(low)
        rest = np.stack([chunks.stop, chunks.start])
        for dim in range(num_dims):
            index = rest // strides[:, dim]
            rest -= index * strides[:, dim]
            offset = chunks.offset[:, dim]
            end = (offset + index)[:, None]
            low[dim, :, : dim + 1], high[dim, :, :dim] = offset, offset + chunks.shape[:, dim]
            high[dim, :, dim : dim + 1] = end
            low[dim, :, dim + 1 :], high[dim, :, dim + 1 :] = end, end + 1
        sign = np.repeat(np.array([1, -1]), num_dims * num_chunks)
        row = np.tile(np.arange(num_chunks), 2 * num_dims)
        return cls(low.reshape(num_dims, -1), high.reshape(num_dims, -1), sign, row)

    @property
    def numel(self) -> Ints:
        """The number of elements of each."""
        numel: Ints = np.prod(self.high - self.low, axis=0, dtype=np.int64)
        return numel

    def weight(self, keys: Sequence[np.uint64]) -> Weights:
        """Return what each adds to the weight of all."""
        return _weight(self.low, self.high, keys) * self.sign.view(np.uint64)

    def clipped(self, low: Ints, high: Ints) -> "_Boxes":
        """Return what of them is in a region."""
        low, high = np.maximum(self.low, low[:, None]), np.minimum(self.high, high[:, None])
        keep = np.flatnonzero((low < high).all(axis=0))
        return _Boxes(low[:, keep], high[:, keep], self.sign[keep], self.row[keep])

    def middle_bound(self, low: Ints, high: Ints) -> tuple[int, int]:
        """Return the first dim in which a box ends inside a region, and the middle one of such ends.

        Dim -1: there is none.
        """
        for dim in range(len(low)):
            ends = np.unique(np.concatenate([self.low[dim], self.high[dim]]))
            ends = ends[(ends > low[dim]) & (ends < high[dim])]
            if len(ends):
                return dim, int(ends[len(ends) // 2])
        return -1, 0


def weights(chunks: ChunkTable, keys: Sequence[np.uint64]) -> Weights:
    """Return what each chunk weighs, given a key a dim."""
    weight: Weights = _Boxes.of(chunks).weight(keys).reshape(2 * len(keys), len(chunks)).sum(axis=0)
    return weight


def box_weights(chunks: ChunkTable, keys: Sequence[np.uint64]) -> Weights:
    """Return what the whole box of each chunk weighs, given a key a dim."""
    return _weight(chunks.offset.T, (chunks.offset + chunks.shape).T, keys)


def _weight(low: Ints, high: Ints, keys: Sequence[np.uint64]) -> Weights:
    """Return the product over the dims of H(high) - H(low)."""
    product = np.ones(low.shape[1], np.uint64)
    for low_1, high_1, key in zip(low, high, keys, strict=True):
        product *= _random(high_1, key) - _random(low_1, key)
    return product


def _random(number: Ints, key: np.uint64) -> Weights:
    """Return 64 random bits of a number and a key (the finalizer of SplitMix64, Steele et al. 2014)."""
    mixed = number.astype(np.uint64)
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    mixed += key
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed ^= mixed >> np.uint64(shift)
        mixed *= np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def _held_twice(chunks: ChunkTable) -> Ints:
    """Return the tensors of which two chunks share elements, given chunks sorted by tensor.

    O(pairs of chunks of a tensor).
    """
    low, high = chunks.bounds()
    counts = np.searchsorted(chunks.tensor, chunks.tensor, "right") - np.arange(len(chunks)) - 1
    turns = np.flatnonzero(np.diff(np.cumsum(counts) // PAIRS_AT_ONCE)) + 1
    tensors = [np.empty(0, np.int64)]
    for rows in np.split(np.arange(len(chunks)), turns):
        one, other = np.repeat(rows, counts[rows]), ramps(rows + 1, counts[rows])
        near = np.ones(len(one), bool)
        for first, end in zip(low, high, strict=True):
            near &= (first[one] < end[other]) & (first[other] < end[one])
        one, other = one[near], other[near]
        tensors.append(chunks.tensor[one[_num_shared(chunks.take(one), chunks.take(other)) > 0]])
    return np.unique(np.concatenate(tensors))


def _num_shared(one: ChunkTable, other: ChunkTable) -> Ints:
    """Return how many elements each chunk shares with the one in the same row of another table."""
    num_dims = one.offset.shape[1]
    a, b = _Boxes.of(one), _Boxes.of(other)
    shared = np.ones((2 * num_dims, 2 * num_dims, len(one)), np.int64)

    def by_box(column: Ints) -> Ints:
        return column.reshape(2 * num_dims, len(one))

    for dim in range(num_dims):
        end = np.minimum(by_box(a.high[dim])[:, None], by_box(b.high[dim]))
        shared *= np.maximum(end - np.maximum(by_box(a.low[dim])[:, None], by_box(b.low[dim])), 0)
    shared *= by_box(a.sign)[:, None] * by_box(b.sign)
    num_shared: Ints = shared.sum(axis=(0, 1))
    return num_shared


def _span(low: Sequence[int], high: Sequence[int]) -> str:
    return "[" + ", ".join(f"{a}:{b}" for a, b in zip(low, high, strict=True)) + "]"


def _by(writers: Ints) -> str:
    return f", by {named_writers(np.unique(writers).tolist())}" if len(writers) else ""
