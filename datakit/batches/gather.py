"""Batches: rows of several stores, cut, put into memory and gathered. Which rows these are, a Blend says.

The gather makes tokens, labels, positions and loss mask of rows of L + 1 tokens, in pieces of shards.
csrc/datakit/gather.cpp reads every source token once, without the GIL, on several threads; its test says the same in
numpy.
"""

import errno
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from datakit.batches.batch import BYTES_A_TOKEN, PLAIN, BatchOptions, Bytes, HostBatch, Int32s
from datakit.batches.row_pieces import CutRows, RowPieces, ShardTable, plain_spans, row_spans
from datakit.format.native import address_of, check_read, library
from datakit.format.shard import Int64s
from datakit.shards.block_cache import BlockCache
from datakit.store.token_store import NO_EOD, TokenStore
from threefold.errors import UserError

MAX_THREADS = min(4, len(os.sched_getaffinity(0)))
_NONE = None, None, None  # labels, positions and loss mask of a batch that has tokens alone
_TOKENS_A_THREAD = 1 << 18  # below this a further thread costs more than it brings


def gather(
    pieces: RowPieces,
    eod_ids: Int64s,
    seq_length: int,
    options: BatchOptions = PLAIN,
    out: Bytes | None = None,
    *,
    is_packed: bool = False,
    tokens_only: bool = False,
) -> HostBatch:
    """Make a batch [rows, seq_length], in the memory `out` if it is given, or fewer columns if the options cut them.

    `eod_ids` has the end-of-document token of each row, or NO_EOD. With `tokens_only` the batch holds tokens alone,
    unless `out` has room for all. UserError if bounds of documents are asked for, and a store's documents have no
    end-of-document token between them; StorageError if a mapped file can no longer be read.
    """
    num_rows = len(eod_ids)
    num_columns = options.width(pieces.longest, seq_length) if is_packed else seq_length
    batch = (
        HostBatch.allocate(num_rows, num_columns, tokens_only=tokens_only)
        if out is None
        else HostBatch.over(out, (num_rows, seq_length), tokens_only=tokens_only).cut(num_columns)
    )
    num_tokens, native = num_rows * num_columns, pieces.native
    tokens = address_of(batch.buffer)
    others: tuple[int | None, ...] = _NONE
    if batch.buffer.size == num_tokens * BYTES_A_TOKEN:
        others = tokens + 8 * num_tokens, tokens + 16 * num_tokens, tokens + 24 * num_tokens
    function = library().dk_gather_packed if is_packed else library().dk_gather
    resets = () if is_packed else (options.reset_positions,)
    code = function(
        address_of(native), len(native), num_rows, num_columns, address_of(eod_ids), options.mask_eod_loss, *resets,
        tokens, *others, max(1, min(MAX_THREADS, num_tokens // _TOKENS_A_THREAD)),
    )  # fmt: skip
    assert code != -errno.EINVAL, "rows sum to seq_length + 1 tokens of 2 or 4 bytes, or fewer if they are packed"
    check_read(code, f"a batch of {num_rows} rows")
    if not is_packed and not options.document_bounds:
        return batch
    return replace(batch, cu_seqlens=_document_bounds(batch, None if is_packed else eod_ids))


def _document_bounds(batch: HostBatch, eod_ids: Int64s | None) -> Int32s:
    """Return where documents begin among all tokens, and the number of tokens.

    Packed rows say it by their positions, others by the end-of-document tokens, of which each row has its own.
    """
    if eod_ids is None:
        begins = batch.positions == 0
    elif NO_EOD in eod_ids:
        raise UserError(
            "the bounds of documents are asked for, and a store's documents have no end-of-document token",
            hint="datakit pack STORE --seq-length L, and data.packing = best_fit",
        )
    else:
        begins = np.ones(batch.tokens.shape, bool)
        np.equal(batch.tokens[:, :-1], eod_ids[:, None], out=begins[:, 1:])
    return np.append(np.flatnonzero(begins), begins.size).astype(np.int32)


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
