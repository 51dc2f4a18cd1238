"""Batches: rows of several stores, cut, put into memory and gathered. Which rows these are, a Blend says."""

from collections.abc import Sequence
from functools import cached_property

from datakit.batches.batch import BatchOptions, Bytes, HostBatch
from datakit.batches.gather import gather
from datakit.batches.row_pieces import CutRows, ShardTable, plain_spans, row_spans
from datakit.format.shard import Int64s
from datakit.shards.block_cache import BlockCache
from datakit.store.token_store import TokenStore


class Batches:
    """What batches of a blend's stores are made by; safe to use from several threads."""

    def __init__(self, stores: Sequence[TokenStore]) -> None:
        """Take the stores, which are packed all or none."""
        self._stores, self.is_packed = stores, stores[0].packing != "concat"
        self._is_contiguous = all(store.rows.is_contiguous for store in stores)

    @cached_property
    def table(self) -> ShardTable:
        """Where the stores' shards are."""
        return ShardTable(self._stores)

    @cached_property
    def caches(self) -> tuple[BlockCache, ...]:
        """The caches that the stores are read through."""
        return tuple({store.cache: None for store in self._stores if store.cache is not None})

    def cut(self, sources: Int64s, starts: Int64s, seq_length: int) -> CutRows:
        """Return rows of one length, each of a store and named by the address row * seq_length, before any is read."""
        if self._is_contiguous:
            spans = plain_spans(sources, starts, seq_length)
        else:
            spans = row_spans(self._stores, sources.tolist(), (starts // seq_length).tolist(), seq_length)
        return self.table.cut(sources, starts, spans, whole=self.is_packed)

    def make(
        self, rows: CutRows, seq_length: int, options: BatchOptions, out: Bytes | None, *, tokens_only: bool
    ) -> HostBatch:
        """Return rows as a batch [rows, seq_length], made in `out` if it is given; with `tokens_only` as `gather`."""
        pieces, eod_ids = self.table.place(rows), self.table.eod_ids[rows.sources]
        return gather(pieces, eod_ids, seq_length, options, out, is_packed=self.is_packed, tokens_only=tokens_only)
