"""The batch gather: rows of L + 1 tokens, in spans of shards, become tokens, labels, positions and loss mask.

csrc/datakit/gather.cpp reads every source token once, without the GIL, on several threads; its test says the same in
numpy. Mapped shards are read where they are, the tokens of others are staged first.
"""

from array import array
from bisect import bisect_right
from dataclasses import replace

import numpy as np

from datakit.packing.native import packing_library
from datakit.packing.packed_store import PackedStore
from datakit.store.shard import TokenShard
from datakit.store.token_store import NO_EOD, TokenStore
from datakit.stream.batch import BYTES_A_TOKEN, PLAIN, BatchOptions, Bytes, HostBatch, Int32s
from datakit.stream.native import address_of, stream_library
from datakit.stream.staging import Wanted
from threefold.errors import UserError

MAX_THREADS = 4
_NONE = None, None, None  # labels, positions and loss mask of a batch that has tokens alone
_TOKENS_A_THREAD = 1 << 18  # below this a further thread costs more than it brings


class RowSpans:
    """The places of a batch's rows in shards; holds the shards while the batch is made.

    `native` has for each span its row, address, tokens and bytes a token, a dk_piece, in the order of rows and places
    in them. If its shard is not mapped, the address is 0, and `wanted` has what is to be read, by the span's number.
    """

    fields = 4

    def __init__(self, seq_length: int) -> None:
        self.seq_length = seq_length
        self.eod_ids: list[int] = []
        self.native: list[int] = []
        self.wanted = Wanted()
        self._shards: list[TokenShard] = []

    @property
    def num_rows(self) -> int:
        """Rows of the batch."""
        return len(self.eod_ids)

    def add(self, store: TokenStore, start: int) -> None:
        """Let the next row begin at an address of the store."""
        eod_ids, native = self.eod_ids, self.native
        row, starts, itemsize = len(eod_ids), store.token_starts, store.itemsize
        eod_ids.append(store.eod_or_none)
        for begin, stop in store.spans_at(start, self.seq_length):
            while begin < stop:
                number = bisect_right(starts, begin) - 1
                first, end = starts[number], starts[number + 1]
                count = (stop if stop < end else end) - begin
                if store.is_mapped:
                    shard = store.shard(number)
                    self._shards.append(shard)
                    native += (row, shard.address + (begin - first) * itemsize, count, itemsize)
                else:
                    self._want(store, number, begin - first, count)
                    native += (row, 0, count, itemsize)
                begin += count

    def _want(self, store: TokenStore, shard: int, first: int, num_tokens: int) -> None:
        """Let tokens of a shard be read for the next span."""
        self.wanted.add(len(self.native) // self.fields, store, shard, first, num_tokens)


class PackedSpans(RowSpans):
    """The same of packed rows: `native` has for each piece also whether its document goes on, a dk_packed_piece."""

    fields = 5
    longest = 0  # of the rows' tokens without padding

    def add(self, store: TokenStore, start: int) -> None:
        """Let the next row be row `start / seq_length` of the index; CheckFailed if a piece leaves its shard."""
        assert isinstance(store, PackedStore), "a blend's stores are all packed or none"
        row, number = self.num_rows, start // self.seq_length
        self.eod_ids.append(store.eod_or_none)
        num_tokens = 0
        for piece in store.pieces(number):
            num_tokens += piece.size
            if not 0 <= piece.start < store.num_tokens:
                raise store.index.damaged(f"row {number} has token {piece.start} of {store.num_tokens}")
            place, first = store.locate_token(piece.start)
            if piece.start + piece.size + piece.goes_on > store.token_starts[place + 1]:
                raise store.index.damaged(f"row {number} has {piece.size} tokens from token {piece.start} on")
            address = 0
            if store.is_mapped:
                shard = store.shard(place)
                self._shards.append(shard)
                address = shard.address + (piece.start - first) * store.itemsize
            else:  # with the label after a piece whose document goes on
                self._want(store, place, piece.start - first, piece.size + piece.goes_on)
            self.native += (row, address, piece.size, store.itemsize, piece.goes_on)
        self.longest = max(self.longest, num_tokens)


def gather(
    spans: RowSpans, options: BatchOptions = PLAIN, out: Bytes | None = None, *, tokens_only: bool = False
) -> HostBatch:
    """Make a batch [rows, seq_length], in the memory `out` if it is given, or fewer columns if the options cut them.

    With `tokens_only` it holds tokens alone, unless that memory has room for all. UserError if bounds of documents are
    asked for, and a store's documents have no end-of-document token between them.
    """
    num_rows, seq_length, is_packed = spans.num_rows, spans.seq_length, isinstance(spans, PackedSpans)
    if isinstance(spans, PackedSpans):
        seq_length = options.width(spans.longest, seq_length)
    batch = (
        HostBatch.allocate(num_rows, seq_length, tokens_only=tokens_only)
        if out is None
        else HostBatch.over(out, (num_rows, spans.seq_length), tokens_only=tokens_only).cut(seq_length)
    )
    pieces, eod_ids, num_tokens = array("q", spans.native), array("q", spans.eod_ids), num_rows * seq_length
    staged = None
    if spans.wanted:
        staged, numbers, addresses = spans.wanted.stage()
        np.frombuffer(pieces, np.int64)[numbers * spans.fields + 1] = addresses
    num_threads = max(1, min(MAX_THREADS, num_tokens // _TOKENS_A_THREAD))
    tokens = address_of(batch.buffer)
    others: tuple[int | None, ...] = _NONE
    if batch.buffer.size == num_tokens * BYTES_A_TOKEN:
        others = tokens + 8 * num_tokens, tokens + 16 * num_tokens, tokens + 24 * num_tokens
    function = packing_library().dk_gather_packed if is_packed else stream_library().dk_gather
    resets = () if is_packed else (options.reset_positions,)
    code = function(
        pieces.buffer_info()[0], len(pieces) // spans.fields, num_rows, seq_length, eod_ids.buffer_info()[0],
        options.mask_eod_loss, *resets, tokens, *others, num_threads,
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
