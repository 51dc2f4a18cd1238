"""Rows: which tokens of a store each row of a batch reads, as one Protocol; ConcatRows: its tokens one after the other.

Others are PackedRows, by a packing index, MegatronRows, in an order of documents, and RecordedRows, which are known
and not read. None of them knows where the store's bytes are.
"""

from typing import NamedTuple, Protocol

import numpy as np

from datakit.format.shard import Int64s
from datakit.shards.shards import Shards


class Piece(NamedTuple):
    """Tokens [start, start + size) of a store, all of one document, which `goes_on` after them or ends."""

    start: int
    size: int
    goes_on: bool


class Rows(Protocol):
    """The rows of one store; safe to read from several threads.

    `packing` is how documents become rows: `concat` is one after the other, as many tokens as a row has, and the label
    of the last. `place` names the record that says so, "" if there is none. `fingerprint` identifies rows and tokens,
    "" if those of the store do.
    """

    @property
    def packing(self) -> str:
        """How documents become rows."""

    @property
    def place(self) -> str:
        """The folder or URL of a record of the rows, "" if they need none."""

    @property
    def fingerprint(self) -> str:
        """What identifies them, "" if the store's content does."""

    @property
    def is_contiguous(self) -> bool:
        """Whether row r of L tokens is tokens [rL, rL + L] of the store."""

    @property
    def choice(self) -> "RowsChoice | None":
        """What they are bound from, None for those that any store has."""

    def of_length(self, seq_length: int) -> "RowsChoice | None":
        """Return what rows of another length are bound from; None if these serve."""

    def num_rows(self, seq_length: int) -> int:
        """Return how many rows of so many tokens there are."""

    def pieces(self, row: int, seq_length: int) -> list[Piece]:
        """Return the pieces of the store that a row reads, in the order of its tokens.

        A piece that goes on also reads the token after it, as a label.
        """

    def rows_of(self, document: int, tokens: range, seq_length: int) -> Int64s:
        """Return the rows that read some of the `tokens` of a document, in rising order."""


class RowsChoice(Protocol):
    """A description of rows that a store is to be read in; pickled as itself."""

    def bound(self, shards: Shards) -> Rows:
        """Return the rows of a store that has these shards; UserError if it has none such."""


class ConcatRows:
    """Rows of a store's tokens, one after the other."""

    packing, place, fingerprint, is_contiguous, choice = "concat", "", "", True, None

    def __init__(self, num_tokens: int) -> None:
        """Take the tokens of the store."""
        self._num_tokens = num_tokens

    def of_length(self, seq_length: int) -> None:
        """Return None: they are of any length."""

    def num_rows(self, seq_length: int) -> int:
        """Return how many rows of so many tokens the store's tokens make."""
        return max(0, (self._num_tokens - 1) // seq_length)

    def pieces(self, row: int, seq_length: int) -> list[Piece]:
        """Return the tokens of a row with the last label: rows 0 and 1 of 4 tokens read [0, 5) and [4, 9)."""
        return [Piece(row * seq_length, seq_length + 1, goes_on=False)]

    def rows_of(self, document: int, tokens: range, seq_length: int) -> Int64s:
        """Return the rows that read tokens of a document: the one before too, if its last label is the first."""
        first = max(0, -(-tokens.start // seq_length) - 1)
        last = min((tokens.stop - 1) // seq_length, self.num_rows(seq_length) - 1)
        return np.arange(first, last + 1 if tokens else first)
