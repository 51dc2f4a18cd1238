"""RowPieces: where the tokens of a batch's rows are in the memory of this process, or of open files.

A row is one span of token addresses of its store, or several: of packed rows each piece of a document is one. Spans are
cut at the ends of shards (csrc/datakit/cut.cpp), and each shard that they meet is opened once a batch. Of a store with
shards of 1,000 tokens, the span [900, 1200) is tokens 900 to 999 of shard 0, and 0 to 199 of shard 1.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from datakit.packing.packed_store import PackedStore
from datakit.store.shard import Int64s
from datakit.store.token_store import TokenStore
from datakit.stream.gone_store import GoneStore
from datakit.stream.native import address_of, stream_library
from datakit.stream.staging import stage
from threefold.errors import CheckFailed

ROW, STORE, START, NUM_TOKENS, GOES_ON = range(5)  # the columns of spans, each a dk_span
_, _TOKENS, _COUNT, _ITEMSIZE, _GOES_ON = range(5)  # and of pieces, each a dk_piece


@dataclass(frozen=True, slots=True)
class RowPieces:
    """The pieces of a batch's rows, [pieces, 5], a dk_piece each; `held` keeps alive what they point to."""

    native: Int64s
    held: Sequence[Any]

    @property
    def longest(self) -> int:
        """The tokens of the longest row."""
        return int(np.bincount(self.native[:, ROW], self.native[:, _COUNT]).max())


class ShardTable:
    """Where the shards of several stores begin, as a table for native code; safe to use from several threads."""

    def __init__(self, stores: Sequence[TokenStore]) -> None:
        """Take the stores of a blend, or some of them."""
        self._stores = stores
        self._starts = [array("q", store.token_starts) for store in stores]
        rows = [(each.buffer_info()[0], len(each) - 1, store.itemsize) for each, store in zip(self._starts, stores)]
        self._native = np.array(rows, np.int64)
        self._address = address_of(self._native)
        self.eod_ids = np.array([store.eod_or_none for store in stores], np.int64)

    def cut(self, spans: Int64s, *, whole: bool = False) -> RowPieces:
        """Return the pieces of spans, [spans, 5], a dk_span each, after all that is not mapped was read.

        With `whole` they are those of packed rows, each in one shard with the token after it where it goes on:
        CheckFailed if one is not. Errors as of TokenStore.shard, and of `stage`.
        """
        most = len(spans)
        while True:
            found = np.empty(8 * most + 1, np.int64)  # pieces, the slot of each, shards, how many these are
            address = address_of(found)
            count = stream_library().dk_cut(
                self._address, address_of(spans), len(spans), whole, most, address, address + 40 * most,
                address + 48 * most, address + 64 * most,
            )  # fmt: skip
            if count < 0:
                raise self._damaged(*spans[-1 - count].tolist())
            if count <= most:
                pieces, slots, shards = found[: 5 * count], found[5 * most :][:count], found[6 * most :]
                return self._placed(pieces.reshape(-1, 5), slots, shards[: 2 * found[-1]].reshape(-1, 2).tolist())
            most = count

    def _damaged(self, row: int, source: int, start: int, num_tokens: int, goes_on: int) -> CheckFailed:
        store = self._stores[source]
        assert isinstance(store, PackedStore), f"row {row} has tokens of {store.place} from {start} on"
        what = f"has {num_tokens} tokens from token {start} on, which are not in one shard"
        if not 0 <= start < store.num_tokens:
            what = f"has token {start} of {store.num_tokens}"
        return store.index.damaged(f"one of its rows {what}")

    def _placed(self, pieces: Int64s, slots: Int64s, places: Sequence[Sequence[int]]) -> RowPieces:
        """Return pieces that know where their tokens are in memory, from those that know it of a shard of `places`."""
        shards = [(self._stores[source], number) for source, number in places]
        held: list[Any] = [store.shard(number) if store.is_mapped else None for store, number in shards]
        addresses = np.array([0 if shard is None else shard.address for shard in held], np.int64)
        if None not in held:
            pieces[:, _TOKENS] += addresses[slots]
            return RowPieces(pieces, held)
        is_read = addresses[slots] == 0
        read = pieces[is_read]
        num_tokens = read[:, _COUNT] + read[:, _GOES_ON]  # with the label after a piece whose document goes on
        stops = read[:, _TOKENS] + num_tokens * read[:, _ITEMSIZE]
        buffer, found = stage(shards, np.stack([slots[is_read], read[:, _TOKENS], stops], axis=1))
        pieces[:, _TOKENS] += addresses[slots]
        pieces[is_read, _TOKENS] = found
        return RowPieces(pieces, [*held, buffer])


def plain_spans(sources: Int64s, starts: Int64s, seq_length: int) -> Int64s:
    """Return the tokens that rows read, one after the other from an address of their store on: spans, [rows, 5]."""
    spans = np.zeros((len(sources), 5), np.int64)
    spans[:, ROW], spans[:, STORE] = np.arange(len(sources)), sources
    spans[:, START], spans[:, NUM_TOKENS] = starts, seq_length + 1
    return spans


def packed_spans(stores: Sequence[TokenStore], sources: Sequence[int], rows: Sequence[int]) -> Int64s:
    """Return the pieces of documents that packed rows of some of the stores hold: spans, [pieces, 5]."""
    found = []
    for number, (source, row) in enumerate(zip(sources, rows)):
        store = stores[source]
        if isinstance(store, GoneStore):
            store.refuse()
        assert isinstance(store, PackedStore), "a blend's stores are all packed or none"
        found += [(number, source, piece.start, piece.size, piece.goes_on) for piece in store.pieces(row)]
    return np.array(found, np.int64)
