"""RowPieces: where the tokens of a batch's rows are in the memory of this process. CutRows: where they are in shards.

A row is one span of token addresses of its store, or several: of packed rows each piece of a document is one. Spans are
cut at the ends of shards (csrc/datakit/cut.cpp), and each shard that they meet is opened once a batch. Of a store with
shards of 1,000 tokens, the span [900, 1200) is tokens 900 to 999 of shard 0, and 0 to 199 of shard 1.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from datakit.batches.staging import stage
from datakit.format.native import STORE, address_of, library
from datakit.format.shard import Int64s
from datakit.store.token_store import TokenStore
from threefold.errors import CheckFailed, quoted

# columns, as numpy copies and views its own structs three times as slowly as rows of integers
ROW, STORE_NUMBER, START, NUM_TOKENS, GOES_ON = range(5)  # of spans, each a dk_span
_, _TOKENS, _COUNT, _ITEMSIZE, _GOES_ON = range(5)  # of pieces, each a dk_piece

_NO_MEMORY = -(2**63)
_HOT_PIECES = 256  # are placed between two looks at what is in memory, as a look takes a tenth of a small batch's time


@dataclass(frozen=True, slots=True)
class CutRows:
    """The rows of a batch, known before anything of their tokens is read.

    Each row is of one of `sources`, its first token at one of `starts` there. `pieces`, [pieces, 5], are a
    dk_piece each, of which piece i is in shard `slots[i]` of `shards`: pairs of a source and a number.
    """

    sources: Int64s
    starts: Int64s
    pieces: Int64s
    slots: Int64s
    shards: list[tuple[int, int]]

    @property
    def num_bytes(self) -> int:
        """The bytes of the rows' tokens, and those that note where they are."""
        return int((self.pieces[:, _COUNT] * self.pieces[:, _ITEMSIZE]).sum()) + self.pieces.nbytes

    def ranges(self) -> Int64s:
        """Return the bytes of shards that the pieces read, with the label after one whose document goes on.

        [pieces, 3]: the slot, the first byte and the byte after the last.
        """
        begins = self.pieces[:, _TOKENS]
        sizes = (self.pieces[:, _COUNT] + self.pieces[:, _GOES_ON]) * self.pieces[:, _ITEMSIZE]
        return np.stack([self.slots, begins, begins + sizes], axis=1)


@dataclass(frozen=True, slots=True)
class RowPieces:
    """The pieces of a batch's rows, [pieces, 5], a dk_piece each; `memory` keeps alive what they point to."""

    native: Int64s
    memory: Sequence[Any]

    @property
    def longest(self) -> int:
        """The tokens of the longest row."""
        return int(np.bincount(self.native[:, ROW], self.native[:, _COUNT]).max())


class ShardTable:
    """Where the shards of several stores begin, as a table for native code; safe to use from several threads.

    `is_cold` if what was placed last was asked for, as some of it was not in memory.
    """

    def __init__(self, stores: Sequence[TokenStore]) -> None:
        """Take the stores of a blend, or some of them."""
        self._stores, self.is_cold, self._num_unseen = stores, False, _HOT_PIECES
        self._shards = [store.shards for store in stores]
        self._starts = [array("q", store.token_starts) for store in stores]
        rows = [(start.buffer_info()[0], len(start) - 1, store.itemsize) for start, store in zip(self._starts, stores)]
        self._native = np.array(rows, STORE)
        self._address = address_of(self._native)
        self.eod_ids = np.array([store.eod_or_none for store in stores], np.int64)

    def cut(self, sources: Int64s, starts: Int64s, spans: Int64s, *, whole: bool = False) -> CutRows:
        """Return rows, each of a store and begun at a token of it, cut at the ends of shards.

        `spans`, [spans, 5], a dk_span each, are all that they read. With `whole` they are those of packed rows, each in
        one shard with the token after it where it goes on: CheckFailed if one is not.
        """
        most = len(spans)
        while True:
            table = np.empty(8 * most + 1, np.int64)  # pieces, the slot of each, shards, how many these are
            address = address_of(table)
            count = library().dk_cut(
                self._address, address_of(spans), len(spans), whole, most, address, address + 40 * most,
                address + 48 * most, address + 64 * most,
            )  # fmt: skip
            if count == _NO_MEMORY:
                raise MemoryError(f"no memory to cut {len(spans)} spans")
            if count < 0:
                raise self._damaged(*spans[-1 - count].tolist())
            if count <= most:
                pieces, slots, shards = table[: 5 * count], table[5 * most :][:count], table[6 * most :]
                places = zip(*shards[: 2 * table[-1]].reshape(-1, 2).T.tolist())
                return CutRows(sources, starts, pieces.reshape(-1, 5), slots, list(places))
            most = count

    def _damaged(self, row: int, source: int, start: int, num_tokens: int, goes_on: int) -> CheckFailed:
        store = self._stores[source]
        assert store.rows.place, f"row {row} has tokens of {store.place} from {start} on"
        what = f"has {num_tokens} tokens from token {start} on, which are not in one shard"
        if not 0 <= start < store.num_tokens:
            what = f"has token {start} of {store.num_tokens}"
        folder = store.rows.place
        return CheckFailed(f"{folder} is damaged: one of its rows {what}", hint=f"datakit verify {quoted(folder)}")

    def place(self, rows: CutRows) -> RowPieces:
        """Return the pieces of rows, after what is not mapped was read; errors as of Shards.shard and `stage`."""
        pieces, memory, begins = self._in_mapped(rows)
        self.is_cold = self._ask_ahead(pieces, memory, begins)
        if None in memory:
            is_read = begins == 0
            shards = [(self._shards[source], number) for source, number in rows.shards]
            pieces[is_read, _TOKENS], others = stage(shards, rows.ranges()[is_read])
            memory += others
        return RowPieces(pieces, memory)

    def ask_ahead(self, rows: CutRows) -> None:
        """Let the kernel read what rows that are placed later have in mapped shards, if that is not in memory."""
        self._ask_ahead(*self._in_mapped(rows))

    def _in_mapped(self, rows: CutRows) -> tuple[Int64s, list[Any], Int64s]:
        """Return the pieces of rows in mapped shards, these, None for others, and where the shard of each begins."""
        places = [(self._shards[source], number) for source, number in rows.shards]
        memory: list[Any] = [shards.shard(number) if shards.is_mapped else None for shards, number in places]
        begins = np.array([0 if shard is None else shard.address for shard in memory], np.int64)[rows.slots]
        pieces = rows.pieces.copy()  # as they may be placed again
        pieces[:, _TOKENS] += begins
        return pieces, memory, begins

    def _ask_ahead(self, pieces: Int64s, memory: list[Any], begins: Int64s) -> bool:
        self._num_unseen += len(pieces)
        if self._num_unseen < _HOT_PIECES and not self.is_cold:
            return False
        self._num_unseen = 0
        mapped = np.ascontiguousarray(pieces[begins != 0]) if None in memory else pieces
        return len(mapped) > 0 and library().dk_ask_ahead(address_of(mapped), len(mapped)) > 0


def plain_spans(sources: Int64s, starts: Int64s, seq_length: int) -> Int64s:
    """Return the tokens that rows read, one after the other from an address of their store on: spans, [rows, 5]."""
    spans = np.zeros((len(sources), 5), np.int64)
    spans[:, ROW], spans[:, STORE_NUMBER] = np.arange(len(sources)), sources
    spans[:, START], spans[:, NUM_TOKENS] = starts, seq_length + 1
    return spans


def row_spans(stores: Sequence[TokenStore], sources: Sequence[int], rows: Sequence[int], seq_length: int) -> Int64s:
    """Return the pieces that rows of some of the stores read: spans, [pieces, 5]."""
    spans = [
        (number, source, *piece)
        for number, (source, row) in enumerate(zip(sources, rows))
        for piece in stores[source].rows.pieces(row, seq_length)
    ]
    return np.array(spans, np.int64)
