"""Blend: weighted stores read as one endless, deterministic stream of samples, with random access and O(1) start.

Sample n of the stream comes from the store that the rotation of its weights gives; it is that store's k-th sample: k
counts the store's earlier samples in the stream. Sample k of a store is row p(k mod S) of its epoch k div S: tokens
[pL, pL + L] of its address space, S = floor((T - 1) / L), p the epoch's keyed permutation. So nothing here depends on
ranks, batch sizes or history, no sample is lost or repeated, and every prefix keeps to the weights, a few samples off.

Weights may change along the way: segments are append-only `(from_sample, weights)`, and a store goes on where it stood.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import orjson
import xxhash

from datakit.shard import Int64s
from datakit.store import TokenStore
from datakit.stream.batch import HostBatch
from datakit.stream.cursor import Cursor
from datakit.stream.gather import Pieces, gather
from datakit.stream.permutation import Permutation
from datakit.stream.rotation import CIRCLE, Rotation
from threefold.errors import UserError

_BLOCK = 8192  # samples between two places where the counts of the stores are computed from nothing
_MAX_CACHED_BLOCKS = 64


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
        """`sources` are stores with their first weights; `later` appends `(from_sample, weights of all stores)`.

        A store that joins later has weight 0 at first. UserError where a weighted store holds no row.
        """
        self.stores = tuple(store for store, _ in sources)
        self.seq_length, self.seed = seq_length, seed
        first = Segment(0, tuple(float(weight) for _, weight in sources))
        self.segments = (first, *(Segment(start, tuple(map(float, weights))) for start, weights in later))
        self.rows = np.array([max(0, (store.num_tokens - 1) // seq_length) for store in self.stores], np.int64)
        self._check_segments()
        self._rotations = [
            Rotation(segment.weights, _hash(f"{seed}/segment/{i}") % CIRCLE) for i, segment in enumerate(self.segments)
        ]
        self._bases = [np.zeros(len(self.stores), np.int64)]  # samples of each store before each segment
        for i, following in enumerate(self.segments[1:]):
            length = following.from_sample - self.segments[i].from_sample
            self._bases.append(self._bases[i] + self._rotations[i].counts(length))
        self._block_counts: dict[int, Int64s] = {}

    def digest(self, num_segments: int | None = None) -> str:
        """XXH3-64 of what the stream up to the end of the first segments depends on, seed and row length apart."""
        segments = [
            [
                segment.from_sample,
                [[store.fingerprint, arc] for store, arc in zip(self.stores, rotation.arcs) if arc],
            ]
            for segment, rotation in zip(self.segments[:num_segments], self._rotations)
        ]
        return xxhash.xxh3_64_hexdigest(orjson.dumps(segments))

    def check(self, cursor: Cursor) -> None:
        """UserError where this stream does not continue the cursor's."""
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
        """How many of the stream's first samples come from each store."""
        start = num_samples // _BLOCK * _BLOCK
        sources = self._sources(start, num_samples)
        return self._block_start_counts(start) + np.bincount(sources, minlength=len(self.stores))

    def epochs(self, num_samples: int) -> tuple[int, ...]:
        """How many whole epochs of each store the stream's first samples make."""
        return tuple((self.counts(num_samples) // np.maximum(self.rows, 1)).tolist())

    def locate(self, samples: npt.ArrayLike) -> tuple[Int64s, Int64s]:
        """For each global sample, its store's number and which of that store's samples it is."""
        samples = np.asarray(samples, np.int64)
        sources, numbers = np.empty_like(samples), np.empty_like(samples)
        blocks = samples // _BLOCK
        for block in np.unique(blocks):
            inside = blocks == block
            start = int(block) * _BLOCK
            found = self._locate_range(start, int(samples[inside].max()) + 1)
            sources[inside], numbers[inside] = (column[samples[inside] - start] for column in found)
        return sources, numbers

    def addresses(self, samples: npt.ArrayLike) -> tuple[Int64s, Int64s]:
        """For each global sample, its store's number and the address of its first token there."""
        sources, numbers = self.locate(samples)
        starts = np.empty_like(numbers)
        epochs = numbers // self.rows[sources]
        for source, epoch in set(zip(sources.tolist(), epochs.tolist())):
            chosen = (sources == source) & (epochs == epoch)
            key = f"{self.seed}/{self.stores[source].fingerprint}/{epoch}".encode()
            order = Permutation(int(self.rows[source]), key)
            starts[chosen] = order(numbers[chosen] % self.rows[source]) * self.seq_length
        return sources, starts

    def batch(self, samples: npt.ArrayLike, *, mask_eod_loss: bool = False, reset_positions: bool = False) -> HostBatch:
        """The given global samples as one batch [samples, seq_length]."""
        sources, starts = self.addresses(samples)
        pieces = Pieces(len(sources), self.seq_length)
        for source in np.unique(sources):
            rows = np.flatnonzero(sources == source)
            pieces.add(self.stores[source], rows, starts[rows])
        return gather(pieces, mask_eod_loss=mask_eod_loss, reset_positions=reset_positions)

    def _locate_range(self, start: int, stop: int) -> tuple[Int64s, Int64s]:
        """Store and number of the samples [start, stop); start is a block's begin."""
        sources = self._sources(start, stop)
        order = np.argsort(sources, kind="stable")
        ordered = sources[order]
        numbers = np.empty_like(sources)
        earlier_in_range = np.arange(len(ordered)) - np.searchsorted(ordered, ordered, side="left")
        numbers[order] = self._block_start_counts(start)[ordered] + earlier_in_range
        return sources, numbers

    def _sources(self, start: int, stop: int) -> Int64s:
        """The store of each of the samples [start, stop)."""
        found = np.empty(stop - start, np.int64)
        begins = [segment.from_sample for segment in self.segments]
        for rotation, begin, end in zip(self._rotations, begins, [*begins[1:], stop]):
            first, last = max(start, begin), min(stop, end)
            if first < last:
                found[first - start : last - start] = rotation.sources(first - begin, last - begin)
        return found

    def _block_start_counts(self, start: int) -> Int64s:
        """How many samples of each store precede a block: a floor sum a store, so the last few are kept."""
        found = self._block_counts.get(start)
        if found is None:
            if len(self._block_counts) >= _MAX_CACHED_BLOCKS:
                self._block_counts.clear()
            number = max(i for i, segment in enumerate(self.segments) if segment.from_sample <= start)
            inside = start - self.segments[number].from_sample
            found = self._bases[number] + self._rotations[number].counts(inside)
            self._block_counts[start] = found
        return found

    def _check_segments(self) -> None:
        if not self.stores or self.seq_length < 1:
            raise UserError(f"a blend of {len(self.stores)} stores with rows of {self.seq_length} tokens")
        for previous, segment in zip((None, *self.segments), self.segments):
            weights = segment.weights
            if len(weights) != len(self.stores):
                raise UserError(f"{len(weights)} weights for {len(self.stores)} stores")
            if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or sum(weights) <= 0:
                raise UserError(f"weights {weights}: none may be negative, and one must be positive")
            if previous is not None and segment.from_sample <= previous.from_sample:
                raise UserError(f"weights from sample {segment.from_sample} on come after {previous.from_sample}")
            for store, weight, rows in zip(self.stores, weights, self.rows):
                if weight > 0 and not rows:
                    raise UserError(
                        f"{store.path} holds {store.num_tokens} tokens, too few for one row of {self.seq_length} + 1",
                        hint=f"--seq-length {max(1, store.num_tokens - 1)}",
                    )


def _hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode())
