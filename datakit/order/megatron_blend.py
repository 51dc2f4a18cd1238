"""MegatronBlend: the stream of megatron-core's training datasets, sample for sample; its stores' rows are their own.

Which store a sample is of is the greedy choice of BlendedDataset: the first store whose weight * n - (its samples so
far) is largest. That has no formula, so the choices are kept, 2 bytes a sample, with counts at each some thousandth;
they are made at first use. Which row it is, MegatronRows says. The order has an end, and no segments change it.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from datakit.format.native import library
from datakit.format.shard import Int64s
from datakit.order.blend import Blend
from datakit.order.document_masks import DocumentMasks
from datakit.order.mixture import Mixture, Segment
from datakit.order.sources import Sources
from datakit.order.stream_record import Cursor, Source, StreamRecord
from datakit.rows.megatron_order import MAX_SEED, MAX_SOURCES, MegatronOrder, normalized
from datakit.rows.megatron_rows import MegatronChoice, MegatronRows
from datakit.store.token_store import TokenStore
from threefold.errors import UserError

_MIN_STRIDE, _STRIDE_A_SOURCE = 1024, 16


class GreedyMixture(Mixture):
    """Which store each sample comes from, from the order's sample `start` on."""

    def __init__(self, weights: Sequence[float], num_rows: Sequence[int], size: int, start: int) -> None:
        """Take weights that are positive, the rows of each store, and the samples of the order."""
        super().__init__([Segment(0, tuple(weights))])
        self._weights, self._num_rows, self._size, self._start = normalized(weights), num_rows, size, start
        self._stride = max(_MIN_STRIDE, _STRIDE_A_SOURCE * len(weights))
        self.max_samples = size - start

    def counts(self, num_samples: int) -> Int64s:
        """Return how many of the stream's first samples come from each source."""
        counts: Int64s = self.positions(num_samples) - self.positions(0)
        return counts

    def positions(self, num_samples: int) -> Int64s:
        """Return how far each source is after the stream's first samples: with those before its start."""
        if not 0 <= num_samples <= self.max_samples:
            raise UserError(f"the order ends after {self.max_samples} samples, {num_samples} are asked for")
        block, rest = divmod(self._start + num_samples, self._stride)
        if len(self._weights) == 1:
            return np.array([self._start + num_samples], np.int64)
        inside = np.bincount(self._block(block)[:rest], minlength=len(self._weights))
        found: Int64s = self._chosen[1][block] + inside
        return found

    def locate(self, samples: Int64s) -> tuple[Int64s, Int64s]:
        """For each sample, its source and which of that source's samples it is."""
        samples = samples + self._start
        if len(self._weights) == 1:
            return np.zeros_like(samples), samples
        chosen, counts = self._chosen
        sources = chosen[samples].astype(np.int64)
        blocks = samples // self._stride
        numbers = counts[blocks, sources]
        for place, (sample, block, source) in enumerate(zip(samples.tolist(), blocks.tolist(), sources.tolist())):
            numbers[place] += np.count_nonzero(chosen[block * self._stride : sample] == source)
        return sources, numbers

    def sample_of(self, source: int, number: int) -> int | None:
        """Return the sample that is a source's `number`-th, None if it is before the start: `locate` inverted."""
        if len(self._weights) > 1:
            counts = self._chosen[1][:, source]
            block = int(np.searchsorted(counts, number, "right")) - 1
            inside = np.flatnonzero(self._block(block) == source)[number - int(counts[block])]
            number = block * self._stride + int(inside)
        return number - self._start if number >= self._start else None

    def _block(self, number: int) -> npt.NDArray[np.uint16]:
        return self._chosen[0][number * self._stride : (number + 1) * self._stride]

    @cached_property
    def _chosen(self) -> tuple[npt.NDArray[np.uint16], Int64s]:
        """The source of each sample, and how many samples each source has before each block, and after the last."""
        num_sources = len(self._weights)
        chosen = np.empty(self._size, np.uint16)
        counts = np.empty((-(-self._size // self._stride) + 1, num_sources), np.int64)
        weights = np.array(self._weights, np.float64)
        code = library().dk_greedy_blend(
            weights.ctypes.data, num_sources, self._size, self._stride, chosen.ctypes.data, counts.ctypes.data
        )
        if code:
            raise MemoryError(f"no memory for a blend of {num_sources} stores")
        for source, (count, most) in enumerate(zip(counts[-1].tolist(), self._num_rows)):
            if count > most:
                raise UserError(
                    f"the order asks store {source} for {count} samples, and its epochs make {most}",
                    hint="a larger data.mid_level_dataset_surplus, or without weights fewer data.train_samples",
                )
        return chosen, counts


class MegatronBlend(Blend):
    """The stream; safe to read from several threads. Its indices are made at first use, in each process."""

    _change_hint = (
        "the order of Megatron is one for a whole run: keep stores, weights, data.train_samples and data.split"
    )

    def __init__(
        self,
        stores: Sequence[TokenStore],
        weights: Sequence[float] = (),
        *,
        seq_length: int,
        seed: int,
        order: MegatronOrder,
    ) -> None:
        """Take stores, and weights as they are given to Megatron, or none.

        Without weights one store is read by itself; of several each is read for one epoch at most, in proportion to
        its rows. UserError if weights do not fit, or a store has no row.
        """
        if not 0 <= seed <= MAX_SEED:
            raise UserError(f"seed {seed} is none of the order of Megatron", hint=f"--train.seed, up to {MAX_SEED}")
        if not 1 <= len(stores) <= MAX_SOURCES or (weights and len(weights) != len(stores)):
            raise UserError(f"{len(weights)} weights for {len(stores)} stores", hint="one weight a store, or none")
        if not all(weight > 0 for weight in weights):
            raise UserError(f"weights {list(weights)[:8]}: each must be above 0", hint="leave a store of weight 0 out")
        self.order, self._weights = order, tuple(weights)
        sizes: Sequence[int | None]
        sizes, size = order.sizes(weights) if weights else ([None] * len(stores), order.num_samples)
        if not weights and len(stores) == 1:
            sizes = [size]
        self._read_stores, self._made = list(stores), list[MegatronRows]()
        for store, number in zip(stores, sizes):
            if store.packing != "concat":
                raise UserError(
                    f"{store.place} is packed by {store.packing}, and the order of Megatron cuts rows itself",
                    hint='packing = "concat"',
                )
            self._made.append(MegatronChoice(order, number, seq_length, seed).bound(store.shards))
        num_rows = [rows.epochs.num_rows for rows in self._made]
        if not weights:
            size = num_rows[0] if len(stores) == 1 else min(size, sum(num_rows))
        if size <= order.start_sample:
            raise UserError(f"the order has {size} samples, and none to start at, {order.start_sample}")
        shares = normalized(weights) if weights else num_rows  # which the mixture rounds once more, as the peer does
        mixture = GreedyMixture(shares, num_rows, size, order.start_sample)
        in_order = [TokenStore(store.shards, rows) for store, rows in zip(stores, self._made)]
        sources = Sources.of(in_order, mixture.segments, seq_length)
        epoch_rows = [(rows.num_tokens_read - 1) // seq_length for rows in self._made]
        self._take(sources, mixture, epoch_rows, seed, DocumentMasks(in_order, (), sources))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the stores' paths and what was asked for."""
        made_of = self._read_stores, self._weights
        return partial(MegatronBlend, *made_of, seq_length=self.seq_length, seed=self.seed, order=self.order), ()

    @cached_property
    def record(self) -> StreamRecord:
        """What a run records of its stream: its sources with the rows of an epoch, their weights, the order."""
        sources = [Source(store.place, store.fingerprint, rows) for store, rows in zip(self.stores, self.rows.tolist())]
        return StreamRecord.of(sources, self.segments, {}, self.order.to_json(), orders_copies=False)

    def following(self, cursor: Cursor, report: Callable[[str], None] = warnings.warn) -> Blend:
        """Return this stream: copies have the order that Megatron has for them."""
        return self

    def check(self, cursor: Cursor, recorded: StreamRecord | None = None) -> None:
        """Raise UserError if this stream does not continue the cursor's, or ends before it."""
        super().check(cursor, recorded)
        if cursor.num_samples > self.mixture.max_samples:
            raise UserError(f"the order has {self.mixture.max_samples} samples, and {cursor.num_samples} are read")

    @property
    def notes(self) -> list[str]:
        """What is fetched before the first sample: where the documents of stores behind URLs are."""
        return [
            f"the places of all {store.num_documents:,} documents of {store.place}, for the order of Megatron: "
            f"{shards.places_bytes:,} bytes of the cache {shards.cache.place}"
            for store in self.stores
            if (shards := store.shards.cached)
        ]

    def samples_of(self, source: int, rows: npt.ArrayLike, num_samples: int) -> Int64s:
        """Return which of the stream's first samples are these rows of a store, in order: `addresses` inverted."""
        num_read = int(self.mixture.positions(num_samples)[source])
        read = self._made[source].row_order[:num_read]
        found = [self.mixture.sample_of(source, number) for number in np.flatnonzero(np.isin(read, rows)).tolist()]
        return np.sort(np.array([sample for sample in found if sample is not None], np.int64))

    def rows_at(self, sources: Int64s, numbers: Int64s) -> Int64s:
        """Return the rows that are the `numbers` of some sources."""
        rows = [int(self._made[source].row_order[number]) for source, number in zip(sources.tolist(), numbers.tolist())]
        return np.array(rows, np.int64)

    @cached_property
    def _changes(self) -> list[tuple[int, str, list[Any]]]:
        parts = [[store.fingerprint for store in self.stores], list(self._weights), self.order.to_json()]
        return [(0, "the order begins", parts)]
