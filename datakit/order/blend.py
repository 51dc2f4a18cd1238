"""Blend: weighted stores read as one endless, deterministic stream of samples, with random access and O(1) start.

Sample n of the stream comes from the store that the mixture names; it is that store's k-th sample: k counts the store's
earlier samples in the stream. Sample k of a store is row p(k mod S) of its epoch k div S: tokens [pL, pL + L] of its
address space, S = floor((T - 1) / L), p the epoch's keyed permutation. So nothing here depends on ranks, batch sizes or
history, no sample is lost or repeated, and every prefix keeps to the weights, a few samples off.

Weights may change along the way, samples be skipped, documents be masked: segments are append-only, each from a sample
on, and a store goes on where it was. Rows of another length begin each store again: see Sources.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import xxhash

from datakit.batches.batch import PLAIN, BatchOptions, Bytes, HostBatch
from datakit.batches.gather import Batches
from datakit.batches.row_pieces import CutRows
from datakit.format.shard import Int64s
from datakit.order.arguments import sample_numbers, stores_of, whole_number
from datakit.order.document_masks import DocumentMasks
from datakit.order.epochs import Epochs
from datakit.order.mixture import Change, Mixture, Segment, segment_of, weight_of
from datakit.order.sources import Sources, names_of, places_of_copies
from datakit.order.stream_record import Cursor, Source, StreamRecord
from datakit.shards.block_cache import BlockCache
from datakit.store.token_store import TokenStore
from threefold.errors import UserError, quoted

MAX_SEED = 2**63 - 1


class Blend:
    """The stream; safe to read from several threads. `copies` are places of stores whose content another one has."""

    copies: Sequence[str] = ()
    _block_tokens = 0  # of blocks whose order is shuffled; 0 if that of single rows is
    # what to do if the stream was changed in what is read
    _change_hint = "keep what was, and append [[data.mixture]] with from_sample = {read} and the change"

    def __init__(
        self,
        sources: Sequence[tuple[TokenStore, float]],
        *,
        seq_length: int,
        seed: int = 0,
        later: Sequence[Segment | Change] = (),
        block_tokens: int = 0,
        orders_copies: bool = True,
    ) -> None:
        """Take `sources`, stores with their first weights; `later` appends segments, or (from_sample, all weights).

        With `block_tokens`, rows of so many tokens stay near each other: see Epochs. A store that joins later has
        weight 0 at first. UserError if a weighted store holds no row, a weight is not a finite number from 0 on, or
        the stores were made with different tokenizers. A packed store opens its index of a later length by itself.
        Copies of a store share one order if not `orders_copies`, as in older runs.
        """
        seq_length, seed = whole_number("seq_length", seq_length, 1), whole_number("seed", seed, most=MAX_SEED)
        stores = stores_of(sources)
        segments = [Segment(0, tuple(weight_of(weight) for _, weight in sources)), *map(segment_of, later)]
        read = Sources.of(stores, segments, seq_length)
        mixture = Mixture(read.segments, seed)
        self._block_tokens, self._orders_copies = block_tokens, orders_copies
        self._maker = partial(
            Blend,
            list(zip(stores, segments[0].weights or ())),
            seq_length=seq_length,
            seed=seed,
            later=segments[1:],
            block_tokens=block_tokens,
        )
        if block_tokens:
            read = read.in_stretches_of([self._block_rows(length) * length for length in read.seq_lengths])
        rows = [store.num_rows(length) for store, length in zip(read.stores, read.seq_lengths)]
        self._take(read, mixture, rows, seed, DocumentMasks(stores, segments, read))
        self._check_rows()
        names = names_of(read, mixture.first_samples())
        self.copies = places_of_copies(read, names)
        if orders_copies:
            self._names = names
        block_rows = [self._block_rows(length) for length in read.seq_lengths] if block_tokens else ()
        self._epochs = Epochs([self._epoch_name(source) for source in range(len(rows))], rows, block_rows)

    def _take(self, sources: Sources, mixture: Mixture, rows: Sequence[int], seed: int, masks: DocumentMasks) -> None:
        """Take what any order of samples has: sources, which of them a sample is of, and the rows of their epochs."""
        self.sources, self.stores, self.mixture = sources, sources.stores, mixture
        self.seq_length, self.seed, self._masks = sources.lengths[0], seed, masks
        self._seq_lengths, self._lengths = sources.seq_lengths, np.array(sources.seq_lengths, np.int64)
        self.rows = np.array(rows, np.int64)
        self._num_rows: list[int] = self.rows.tolist()
        self._epoch_samples = np.maximum(self.rows, 1)  # a store without a row has no samples to divide
        self._check_tokenizers()
        self._check_packings()
        self._names = [store.fingerprint for store in self.stores]
        self._batches = Batches(self.stores)
        self._is_plain = not self._masks and not self._batches.is_packed
        self._digests: dict[int, str] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the stores' paths and what was asked for."""
        return partial(self._maker, orders_copies=self._orders_copies), ()

    @property
    def caches(self) -> tuple[BlockCache, ...]:
        """The caches that its stores behind URLs are read through."""
        return self._batches.caches

    @property
    def notes(self) -> list[str]:
        """What is fetched before the first sample, a line each."""
        return []

    @property
    def segments(self) -> tuple[Segment, ...]:
        """What the stream is made of: the first weights, and each change; weights are those of its sources."""
        return self.mixture.segments

    def num_begun(self, num_samples: int) -> int:
        """Return how many of the stream's changes the first samples depend on, the first weights among them."""
        return max(1, sum(begin < num_samples for begin, _, _ in self._changes))

    def digest(self, num_changes: int | None = None) -> str:
        """XXH3-64 of what the stream up to the end of the first changes depends on, seed and row length apart."""
        number = len(self._changes) if num_changes is None else num_changes
        if number not in self._digests:
            parts = [[begin, *parts] for begin, _, parts in self._changes[:number]]
            self._digests[number] = xxhash.xxh3_64_hexdigest(orjson.dumps(parts))
        return self._digests[number]

    @cached_property
    def record(self) -> StreamRecord:
        """What a run records of its stream: its sources and its segments."""
        sources = [
            Source(store.place, store.fingerprint, rows, seq_length)
            for store, rows, seq_length in zip(self.stores, self._num_rows, self._seq_lengths)
        ]
        order = {"shuffle": f"blocks of {self._block_rows(self.seq_length)} rows"} if self._block_tokens else {}
        return StreamRecord.of(
            sources, self.segments, dict(self._masks.digests(self._names)), order, orders_copies=self._orders_copies
        )

    def following(self, cursor: Cursor, report: Callable[[str], None] = warnings.warn) -> "Blend":
        """Return the stream that a cursor is of: this one, or that by the other rule for copies.

        `report` takes a line on that of a run from before copies had orders of their own.
        """
        known = cursor.num_segments
        if not self.copies or self.digest(known) == cursor.digest:
            return self
        other = self._maker(orders_copies=not self._orders_copies)
        if other.digest(known) != cursor.digest:
            return self
        if self._orders_copies:
            what = "copies of a store in one order, so that their rows come twice"
            report(f"the run goes on as it began, {what}: {', '.join(self.copies)}")
        return other

    def check(self, cursor: Cursor, recorded: StreamRecord | None = None) -> None:
        """Raise UserError if this stream does not continue the cursor's; `recorded` shows what was changed."""
        for name in ("seed", "seq_length"):
            if getattr(cursor, name) != getattr(self, name):
                raise UserError(
                    f"the stream to resume has {name} {getattr(cursor, name)}, this one {getattr(self, name)}",
                    hint=f"--train.{name.replace('_', '-')} {getattr(cursor, name)}",
                )
        known, read = cursor.num_segments, cursor.num_samples
        if known > len(self._changes) or self.digest(known) != cursor.digest:
            what = "the stores or weights are not those of the stream to resume; they can only change from a sample on"
            differences = recorded.differences(self.record, read) if recorded else []
            raise UserError("\n  ".join([what, *differences]), hint=self._change_hint.format(read=read))
        for begin, what, _ in self._changes[known:]:
            if begin < read:
                raise UserError(
                    f"{what} from sample {begin} on, but {read} samples are read",
                    hint=f"let this be from sample {read} on: from_sample = {read}",
                )

    def counts(self, num_samples: int) -> Int64s:
        """Return how many of the stream's first samples come from each store."""
        return self.mixture.counts(num_samples)

    def epochs(self, num_samples: int) -> tuple[int, ...]:
        """Return how many whole epochs of each store the stream's first samples make, with those that it skips."""
        return tuple((self.mixture.positions(num_samples) // self._epoch_samples).tolist())

    def locate(self, samples: npt.ArrayLike) -> tuple[Int64s, Int64s]:
        """For each global sample, its store's number and which of that store's samples it is; O(log) each."""
        return self.mixture.locate(sample_numbers(samples, self.mixture.max_samples))

    def addresses(self, samples: npt.ArrayLike) -> tuple[Int64s, Int64s]:
        """For each global sample, its store's number and the address of its first token there.

        That is the tokens of a row times its row, also of a packed store, whose `row_spans` knows the row's tokens.
        """
        sources, numbers = self.locate(samples)
        return sources, self.rows_at(sources, numbers) * self._lengths[sources]

    def samples_of(self, source: int, rows: npt.ArrayLike, num_samples: int) -> Int64s:
        """Return which of the stream's first samples are these rows of a store, in order: `addresses` inverted."""
        num_read = int(self.mixture.positions(num_samples)[source])
        size = max(1, self._num_rows[source])
        found = []
        for epoch, first in enumerate(range(0, num_read, size)):
            numbers = first + self._epochs.positions(source, epoch, rows)
            found += [self.mixture.sample_of(source, number) for number in numbers.tolist() if number < num_read]
        return np.sort(np.array([sample for sample in found if sample is not None], np.int64))

    def is_masked(self, sample: int, source: int, document: int) -> bool:
        """Return whether the loss of a document of a store is masked in a sample."""
        return self._masks.holds(sample, source, document)

    def cut(self, samples: npt.ArrayLike) -> CutRows:
        """Return what a batch of samples reads, of which nothing is read yet; UserError if rows' lengths differ."""
        sources, starts = self.addresses(samples)
        seq_length = self._seq_lengths[sources[0]]
        if len(self.sources.lengths) > 1 and (self._lengths[sources] != seq_length).any():
            raise UserError("the samples of a batch have rows of different lengths", hint="a batch of each length")
        return self._batches.cut(sources, starts, seq_length)

    def batch(
        self,
        samples: npt.ArrayLike,
        options: BatchOptions = PLAIN,
        *,
        out: Bytes | None = None,
        rows: CutRows | None = None,
    ) -> HostBatch:
        """Return the given samples, whose rows have one length, as a batch [samples, seq_length]; UserError if none.

        It is made in `out`, if given, of `num_bytes` or HostBatch.num_bytes; `rows` is what `cut` returned of them.
        """
        rows = self.cut(samples) if rows is None else rows
        seq_length, tokens_only = self._seq_lengths[rows.sources[0]], self._makes_tokens_only(options)
        batch = self._batches.make(rows, seq_length, options, out, tokens_only=tokens_only)
        if self._masks:
            self._masks.apply(
                batch.loss_mask, np.array(samples, ndmin=1).tolist(), zip(rows.sources.tolist(), rows.starts.tolist())
            )
        return batch

    def ask_ahead(self, samples: npt.ArrayLike) -> None:
        """Let mapped shards be read for a batch that is made soon, if the last was not in memory; errors of `cut`."""
        if self._batches.table.is_cold:
            self._batches.table.ask_ahead(self.cut(samples))

    def num_bytes(self, shape: Sequence[int], options: BatchOptions = PLAIN) -> int:
        """Return the bytes of a batch of a shape, [..., seq_length], without what is the same in all rows."""
        return HostBatch.num_bytes(shape, tokens_only=self._makes_tokens_only(options))

    def _makes_tokens_only(self, options: BatchOptions) -> bool:
        """Return whether positions and loss masks are the same in all rows."""
        return self._is_plain and not options.mask_eod_loss and not options.reset_positions

    def rows_at(self, sources: Int64s, numbers: Int64s) -> Int64s:
        """Return the rows that are the `numbers` of some sources, epoch after epoch."""
        return self._epochs.elements(sources, numbers)

    def _epoch_name(self, source: int) -> tuple[bytes, bytes]:
        """Return what is before and after the number of an epoch in the key of a store's order."""
        era = self.sources.eras[source]
        return f"{self.seed}/{self._names[source]}/".encode(), f"/{era}".encode() if era else b""

    def _block_rows(self, seq_length: int) -> int:
        """Return how many rows of a length a block has."""
        return max(1, self._block_tokens // seq_length)

    @cached_property
    def _changes(self) -> list[tuple[int, str, list[Any]]]:
        """Each change of the stream: the sample from which on, what it is, and what it depends on.

        Of the first weights, or others, that is each weighted store with its arc.
        """
        changes: list[tuple[int, str, list[Any]]] = []
        before, eras = None, {begin: era for era, begin in enumerate(self.sources.begins)}
        for run in self.mixture.runs:
            parts: list[Any] = []
            if run.sequence is not before:
                parts = [[[name, arc] for name, arc in zip(self._names, run.sequence.arcs) if arc]]
            what = "weights change" if parts else "samples are skipped"
            era = eras.get(run.begin) if parts else None
            if era:
                what = f"rows have {self.sources.lengths[era]} tokens"
                parts.append(["rows", self.sources.lengths[era]])
            if era is not None and self._block_tokens:
                parts.append(["blocks", self._block_rows(self.sources.lengths[era])])
            changes.append((run.begin, what, parts + [run.offset] * (run.offset > 0)))
            before = run.sequence
        masked = self._masks.digests(self._names)
        changes += [(begin, "documents are masked", ["masked", digest]) for begin, digest in masked]
        return sorted(changes, key=lambda change: change[0])

    def _check_rows(self) -> None:
        weighted = np.zeros(len(self.stores), bool)
        for run in self.mixture.runs:
            weighted |= np.array(run.sequence.arcs) > 0
        for source in np.flatnonzero(weighted & (self.rows == 0)).tolist():
            store = self.stores[source]
            raise UserError(
                f"{store.place} holds {store.num_tokens} tokens, too few for one row of "
                f"{self._seq_lengths[source]} + 1",
                hint=f"--seq-length {store.num_tokens - 1}"
                if store.num_tokens > 1
                else "leave it out, or make it larger: datakit preprocess ... --split 0.9,0.1",
            )

    def _check_packings(self) -> None:
        concat, packed = ([store for store in self.stores if (store.packing == "concat") == is_so] for is_so in (1, 0))
        if concat and packed:
            packing, plain = packed[0].packing, concat[0].path
            raise UserError(
                f"{packed[0].path} is packed by {packing}, {plain} is not: they have other rows",
                hint=f"datakit pack {quoted(plain)} --seq-length {self.seq_length} --packing {packing}",
            )

    def _check_tokenizers(self) -> None:
        """Raise UserError if two stores name different tokenizers; one made of tokens alone names none."""
        named = [(store, found) for store in self.stores if (found := store.manifest.tokenizer.fingerprint)]
        for store, fingerprint in named[1:]:
            first, expected = named[0]
            if fingerprint != expected:
                raise UserError(
                    f"{first.place} was made with the tokenizer of fingerprint {expected}, {store.place} with that of "
                    f"{fingerprint}: the same token is other text there",
                    hint="datakit preprocess INPUT... --output STORE --tokenizer FILE, one for all stores",
                )
