"""The batch gather: rows of L + 1 tokens, in spans of shards, become tokens, labels, positions and loss mask.

csrc/datakit/gather.cpp reads every source token once, without the GIL, on several threads; its test says the same in
numpy. Mapped shards are read where they are, the tokens of others are staged first.
"""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from datakit.packing.native import packing_library
from datakit.packing.packed_store import PackedStore
from datakit.store.shard import TokenShard
from datakit.store.token_store import TokenStore
from datakit.stream.batch import PLAIN, BatchOptions, Bytes, HostBatch, Int32s
from datakit.stream.native import address_of, stream_library
from datakit.stream.staging import UnmappedShard, Wanted, stage
from threefold.errors import UserError

NO_EOD = -1
MAX_THREADS = 4
_TOKENS_A_THREAD = 1 << 18  # below this a further thread costs more than it brings


Shard = TokenShard | UnmappedShard


class RowSpans:
    """The places of a batch's rows in shards; holds the shards while the batch is made.

    `table` has for each span its row, shard, first token there and tokens, in the order of rows and places in them.
    `wanted` has by the number of a span what is to be read for it, if its shard is not mapped.
    """

    def __init__(self, seq_length: int) -> None:
        self.seq_length = seq_length
        self.eod_ids: list[int] = []
        self.table: list[tuple[int, Shard, int, int]] = []
        self.wanted: dict[int, Wanted] = {}

    @property
    def num_rows(self) -> int:
        """Rows of the batch."""
        return len(self.eod_ids)

    def add(self, store: TokenStore, start: int) -> None:
        """Let the next row begin at an address of the store."""
        row = self.num_rows
        self.eod_ids.append(NO_EOD if store.eod_id is None else store.eod_id)
        for begin, stop in store.spans_at(start, self.seq_length):
            while begin < stop:
                number, first = store.locate_token(begin)
                count = min(store.token_starts[number + 1], stop) - begin
                if store.is_mapped:
                    self.table.append((row, store.shard(number), begin - first, count))
                else:
                    shard = UnmappedShard(store, number, store.itemsize)
                    self.wanted[len(self.table)] = shard.wanted(begin - first, count)
                    self.table.append((row, shard, begin - first, count))
                begin += count


class PackedSpans:
    """The same of packed rows: `table` has for each piece also whether its document goes on after it."""

    def __init__(self, seq_length: int) -> None:
        self.seq_length = seq_length
        self.eod_ids: list[int] = []
        self.table: list[tuple[int, Shard, int, int, bool]] = []
        self.wanted: dict[int, Wanted] = {}

    @property
    def num_rows(self) -> int:
        """Rows of the batch."""
        return len(self.eod_ids)

    def add(self, store: TokenStore, start: int) -> None:
        """Let the next row be row `start / seq_length` of the index; CheckFailed if a piece leaves its shard."""
        assert isinstance(store, PackedStore), "a blend's stores are all packed or none"
        row, number = self.num_rows, start // self.seq_length
        self.eod_ids.append(NO_EOD if store.eod_id is None else store.eod_id)
        for piece in store.pieces(number):
            if not 0 <= piece.start < store.num_tokens:
                raise store.index.damaged(f"row {number} has token {piece.start} of {store.num_tokens}")
            place, first = store.locate_token(piece.start)
            if piece.start + piece.size + piece.goes_on > store.token_starts[place + 1]:
                raise store.index.damaged(f"row {number} has {piece.size} tokens from token {piece.start} on")
            shard: Shard
            if store.is_mapped:
                shard = store.shard(place)
            else:  # with the label after a piece whose document goes on
                shard = UnmappedShard(store, place, store.itemsize)
                self.wanted[len(self.table)] = shard.wanted(piece.start - first, piece.size + piece.goes_on)
            self.table.append((row, shard, piece.start - first, piece.size, piece.goes_on))


def gather(spans: RowSpans | PackedSpans, options: BatchOptions = PLAIN, out: Bytes | None = None) -> HostBatch:
    """Make a batch [rows, seq_length], in the memory `out` if it is given.

    UserError if bounds of documents are asked for, and a store's documents have no end-of-document token between them.
    """
    num_rows, seq_length = spans.num_rows, spans.seq_length
    batch = HostBatch.allocate(num_rows, seq_length) if out is None else HostBatch.over(out, (num_rows, seq_length))
    native = array("q")  # a dk_piece each, or a dk_packed_piece
    staged, addresses = stage(spans.wanted)
    table: Sequence[tuple[Any, ...]] = spans.table
    for number, (row, shard, start, count, *goes_on) in enumerate(table):
        if isinstance(shard, UnmappedShard):
            address, itemsize = addresses[number], shard.itemsize
        else:
            itemsize = shard.dtype.itemsize
            address = shard.address + start * itemsize
        native.extend((row, address, count, itemsize, *goes_on))
    eod_ids = array("q", spans.eod_ids)
    num_tokens = num_rows * seq_length
    num_threads = max(1, min(MAX_THREADS, num_tokens // _TOKENS_A_THREAD))
    tokens, column_bytes = address_of(batch.buffer), 8 * num_tokens
    is_packed = isinstance(spans, PackedSpans)
    function = packing_library().dk_gather_packed if is_packed else stream_library().dk_gather
    resets = () if is_packed else (options.reset_positions,)
    code = function(
        native.buffer_info()[0], len(spans.table), num_rows, seq_length, eod_ids.buffer_info()[0],
        options.mask_eod_loss, *resets, tokens, tokens + column_bytes, tokens + 2 * column_bytes,
        tokens + 3 * column_bytes, num_threads,
    )  # fmt: skip
    del staged  # was in use until here
    assert code == 0, "the spans of every row sum to seq_length + 1 tokens of 2 or 4 bytes, or fewer if it is packed"
    if not is_packed and not options.document_bounds:
        return batch
    return replace(batch, cu_seqlens=_document_bounds(batch, None if is_packed else spans.eod_ids))


def _document_bounds(batch: HostBatch, eod_ids: list[int] | None) -> Int32s:
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
        np.equal(batch.tokens[:, :-1], np.array(eod_ids)[:, None], out=begins[:, 1:])
    return np.append(np.flatnonzero(begins), begins.size).astype(np.int32)
