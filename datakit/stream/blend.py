"""Blend: weighted stores read as one endless, deterministic stream of samples, with random access and O(1) start.

Sample n of the stream comes from the store that the weighted sequence names; it is that store's k-th sample: k
counts the store's earlier samples in the stream. Sample k of a store is row p(k mod S) of its epoch k div S: tokens
[pL, pL + L] of its address space, S = floor((T - 1) / L), p the epoch's keyed permutation. So nothing here depends on
ranks, batch sizes or history, no sample is lost or repeated, and every prefix keeps to the weights, a few samples off.

Weights may change along the way: segments are append-only `(from_sample, weights)`, and a store goes on where it stood.
"""

import math
import reprlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import xxhash

from datakit.store.shard import Int64s
from datakit.store.token_store import TokenStore
from datakit.stream.batch import PLAIN, BatchOptions, Bytes, HostBatch
from datakit.stream.cursor import Cursor
from datakit.stream.gather import PackedSpans, RowSpans, gather
from datakit.stream.permutation import Permutation, elements_at
from datakit.stream.weighted_sequence import CIRCLE, WeightedSequence
from threefold.errors import UserError

MAX_SAMPLES = 1 << 62  # the stream is endless, its arithmetic is not
_MAX_KEPT_ORDERS = 4096


@dataclass(frozen=True, slots=True)
class Segment:
    """Weights of all stores, in force from a sample on."""

    from_sample: int
    weights: tuple[float, ...]


class Blend:
    """The stream; safe to read from several threads."""

    def __init__(
        self,
        sources: Sequence[tuple[TokenStore, float]],
        *,
        seq_length: int,
        seed: int = 0,
        later: Sequence[tuple[int, Sequence[float]]] = (),
    ) -> None:
        """Take `sources`, stores with their first weights; `later` appends `(from_sample, weights of all stores)`.

        A store that joins later has weight 0 at first. UserError if a weighted store holds no row, a weight is no
        finite number from 0 on, or the stores were made with different tokenizers.
        """
        self.stores = tuple(store for store, _ in sources)
        self.seq_length, self.seed = seq_length, seed
        changes = [(0, [weight for _, weight in sources]), *later]
        self.segments = tuple(Segment(_whole(start), tuple(map(_weight, weights))) for start, weights in changes)
        self.rows = np.array([store.num_rows(seq_length) for store in self.stores], np.int64)
        self._num_rows: list[int] = self.rows.tolist()
        self._epoch_samples = np.maximum(self.rows, 1)  # a store without a row has no samples to divide
        self._check_segments()
        self._check_tokenizers()
        self._check_packings()
        self._sequences = [
            WeightedSequence(segment.weights, _hash(f"{seed}/segment/{i}") % CIRCLE)
            for i, segment in enumerate(self.segments)
        ]
        self._bases = [np.zeros(len(self.stores), np.int64)]  # samples of each store before each segment
        for i, following in enumerate(self.segments[1:]):
            length = following.from_sample - self.segments[i].from_sample
            self._bases.append(self._bases[i] + self._sequences[i].counts(length))
        self._begins = [segment.from_sample for segment in self.segments]
        self._orders: dict[tuple[int, int], Permutation] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the stores' paths and what was asked for."""
        first, *later = self.segments
        changes = [(segment.from_sample, segment.weights) for segment in later]
        sources = list(zip(self.stores, first.weights))
        return partial(Blend, sources, seq_length=self.seq_length, seed=self.seed, later=changes), ()

    def digest(self, num_segments: int | None = None) -> str:
        """XXH3-64 of what the stream up to the end of the first segments depends on, seed and row length apart."""
        segments = [
            [
                segment.from_sample,
                [[store.fingerprint, arc] for store, arc in zip(self.stores, sequence.arcs) if arc],
            ]
            for segment, sequence in zip(self.segments[:num_segments], self._sequences)
        ]
        return xxhash.xxh3_64_hexdigest(orjson.dumps(segments))

    def check(self, cursor: Cursor) -> None:
        """Raise UserError if this stream does not continue the cursor's."""
        for name in ("seed", "seq_length"):
            if getattr(cursor, name) != getattr(self, name):
                raise UserError(
                    f"the stream to resume has {name} {getattr(cursor, name)}, this one {getattr(self, name)}",
                    hint=f"--train.{name.replace('_', '-')} {getattr(cursor, name)}",
                )
        if cursor.num_segments > len(self.segments) or self.digest(cursor.num_segments) != cursor.digest:
            raise UserError(
                "the stores or weights are not those of the stream to resume; they can only change from a sample on",
                hint="give the former stores and weights, and append the change as a later segment",
            )
        for segment in self.segments[cursor.num_segments :]:
            if segment.from_sample < cursor.num_samples:
                raise UserError(
                    f"weights change from sample {segment.from_sample} on, but {cursor.num_samples} samples are read",
                    hint=f"let them change from sample {cursor.num_samples} on",
                )

    def counts(self, num_samples: int) -> Int64s:
        """Return how many of the stream's first samples come from each store."""
        if not 0 <= num_samples <= MAX_SAMPLES:
            raise UserError(f"the stream has no first {num_samples} samples, from 0 to 2^62 can be counted")
        number = bisect_right(self._begins, num_samples) - 1
        return self._bases[number] + self._sequences[number].counts(num_samples - self._begins[number])

    def epochs(self, num_samples: int) -> tuple[int, ...]:
        """Return how many whole epochs of each store the stream's first samples make."""
        return tuple((self.counts(num_samples) // self._epoch_samples).tolist())

    def locate(self, samples: npt.ArrayLike) -> tuple[Int64s, Int64s]:
        """For each global sample, its store's number and which of that store's samples it is; O(log) each."""
        wanted = _checked(samples)
        if len(self.segments) == 1:
            return self._sequences[0].locate(wanted)
        sources, numbers = np.empty_like(wanted), np.empty_like(wanted)
        segments = np.searchsorted(self._begins, wanted, side="right") - 1
        for segment in set(segments.tolist()):
            inside = segments == segment
            found, earlier = self._sequences[segment].locate(wanted[inside] - self._begins[segment])
            sources[inside], numbers[inside] = found, earlier + self._bases[segment][found]
        return sources, numbers

    def addresses(self, samples: npt.ArrayLike) -> tuple[Int64s, Int64s]:
        """For each global sample, its store's number and the address of its first token there.

        That is seq_length times its row, also of a packed store, whose `row_spans` knows the tokens of the row.
        """
        sources, starts = self._starts(samples)
        return np.array(sources, np.int64), np.array(starts, np.int64)

    def samples_of(self, source: int, rows: npt.ArrayLike, num_samples: int) -> Int64s:
        """Return which of the stream's first samples are these rows of a store, in order: `addresses` inverted."""
        num_read, size = int(self.counts(num_samples)[source]), max(1, self._num_rows[source])
        found = []
        for epoch, first in enumerate(range(0, num_read, size)):
            numbers = first + self._order(source, epoch).positions(rows)
            found += [self._sample_of(source, number) for number in numbers.tolist() if number < num_read]
        return np.sort(np.array(found, np.int64))

    def batch(self, samples: npt.ArrayLike, options: BatchOptions = PLAIN, *, out: Bytes | None = None) -> HostBatch:
        """Return the given global samples as one batch [samples, seq_length]; UserError if there are none.

        It is made in the memory `out`, if that is given: HostBatch.over says what fits.
        """
        is_packed = self.stores[0].packing != "concat"
        spans = PackedSpans(self.seq_length) if is_packed else RowSpans(self.seq_length)
        for source, start in zip(*self._starts(samples)):
            spans.add(self.stores[source], start)
        return gather(spans, options, out)

    def _starts(self, samples: npt.ArrayLike) -> tuple[list[int], list[int]]:
        """Return what `addresses` returns, as lists: for single samples, arrays cost more than what they hold."""
        found, numbers = self.locate(samples)
        sources: list[int] = found.tolist()
        places = []
        for source, number in zip(sources, numbers.tolist()):
            epoch, position = divmod(number, self._num_rows[source])
            places.append((self._order(source, epoch), position))
        return sources, [element * self.seq_length for element in elements_at(places)]

    def _sample_of(self, source: int, number: int) -> int:
        """Return the global sample that is a store's `number`-th."""
        segment = bisect_right(self._bases, number, key=lambda base: int(base[source])) - 1
        inside = number - int(self._bases[segment][source])
        return self._begins[segment] + self._sequences[segment].sample_of(source, inside)

    def _order(self, source: int, epoch: int) -> Permutation:
        """Return the order of a store's rows in one epoch of it; the last few are kept."""
        order = self._orders.get((source, epoch))
        if order is None:
            if len(self._orders) >= _MAX_KEPT_ORDERS:
                self._orders.clear()
            key = f"{self.seed}/{self.stores[source].fingerprint}/{epoch}".encode()
            order = self._orders[source, epoch] = Permutation(self._num_rows[source], key)
        return order

    def _check_segments(self) -> None:
        if not self.stores or self.seq_length < 1:
            raise UserError(f"a blend of {len(self.stores)} stores with rows of {self.seq_length} tokens")
        for previous, segment in zip((None, *self.segments), self.segments):
            weights = segment.weights
            if len(weights) != len(self.stores):
                raise UserError(f"{len(weights)} weights for {len(self.stores)} stores")
            if not min(weights) >= 0 or not 0 < sum(weights) < math.inf:
                raise UserError(
                    f"weights {reprlib.repr(weights)}: none may be negative, one must be positive, their sum finite"
                )
            start = segment.from_sample
            if previous is not None and not previous.from_sample < start < MAX_SAMPLES:
                raise UserError(f"weights from sample {start} on come after {previous.from_sample}")
            for store, weight, rows in zip(self.stores, weights, self.rows):
                if weight > 0 and not rows:
                    raise UserError(
                        f"{store.path} holds {store.num_tokens} tokens, too few for one row of {self.seq_length} + 1",
                        hint=f"--seq-length {max(1, store.num_tokens - 1)}",
                    )

    def _check_packings(self) -> None:
        concat, packed = ([store for store in self.stores if (store.packing == "concat") == is_so] for is_so in (1, 0))
        if concat and packed:
            raise UserError(
                f"{packed[0].path} is packed by {packed[0].packing}, {concat[0].path} is not: they have other rows",
                hint=f"datakit pack {concat[0].path} --seq-length {self.seq_length} --packing {packed[0].packing}",
            )

    def _check_tokenizers(self) -> None:
        """Raise UserError if two stores name different tokenizers; one made of tokens alone names none."""
        named = [(store, found) for store in self.stores if (found := store.manifest.tokenizer.fingerprint)]
        for store, fingerprint in named[1:]:
            first, expected = named[0]
            if fingerprint != expected:
                raise UserError(
                    f"{first.path} was made with the tokenizer of fingerprint {expected}, {store.path} with that of "
                    f"{fingerprint}: the same token is other text there",
                    hint="datakit preprocess INPUT... --output STORE --tokenizer FILE, one for all stores",
                )


def _whole(value: Any) -> int:
    if not isinstance(value, Integral):
        raise UserError(f"weights from sample {reprlib.repr(value)} on: not a whole number", hint="later=[(1000, ...)]")
    return int(value)


def _weight(value: Any) -> float:
    try:
        if not isinstance(value, str | bytes):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise UserError(f"weight {reprlib.repr(value)} is not a number that a float holds", hint="weights like 0.7 and 0.3")


def _checked(samples: npt.ArrayLike) -> Int64s:
    """Sample numbers as int64 [n]; UserError if one is none."""
    found = np.array(samples, ndmin=1)
    if not found.size:
        raise UserError("no samples are asked for", hint="batch([0]) is the stream's first sample")
    listed = found.tolist()
    if found.dtype.kind not in "iu" or found.ndim > 1 or not 0 <= min(listed) <= max(listed) < MAX_SAMPLES:
        raise UserError(f"samples {reprlib.repr(listed)} are not a list of whole numbers from 0 to 2^62 - 1")
    return found.astype(np.int64, copy=False)


def _hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode())
