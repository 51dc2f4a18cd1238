"""GoneStore: a source of a stream whose folder is gone, of which the stream's record knows enough to count on.

Weights of 0 let a stream go on without it: how many rows it had, and which content, says all about the samples after.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from datakit.format.manifest import Manifest
from datakit.format.origins import Origins
from datakit.format.shard import TokenShard
from datakit.store.token_store import TokenStore
from datakit.tokenization.identity import TokenizerIdentity
from threefold.errors import UserError

_UNKNOWN = TokenizerIdentity("", "", 0, None, None)


class GoneStore(TokenStore):
    """A store that can be counted on and not read."""

    def __init__(self, path: Path, rows: Mapping[int, tuple[str, int]], packing: str, seq_length: int) -> None:
        """Take what is known of its rows, by their length: the fingerprint and how many; and which of them to read."""
        super().__init__(path, Manifest("int32", _UNKNOWN, ()))
        self._rows, self._packing, self._seq_length = dict(rows), packing, seq_length
        self.fingerprint, num_rows = self._rows.get(seq_length, ("", 1))
        self.token_starts = [0, num_rows * seq_length + 1]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as what is known of it."""
        return GoneStore, (self.path, self._rows, self._packing, self._seq_length)

    def in_rows_of(self, seq_length: int) -> TokenStore:
        """Return what is known of its rows of another length."""
        return GoneStore(self.path, self._rows, self._packing, seq_length)

    @property
    def packing(self) -> str:
        """How its documents became rows."""
        return self._packing

    @property
    def num_documents(self) -> int:
        """Raise UserError: nobody knows."""
        self.refuse()

    def num_rows(self, seq_length: int) -> int:
        """Return the rows that were recorded of the length that it is read in."""
        return (self.num_tokens - 1) // seq_length

    def shard(self, number: int) -> TokenShard:
        """Raise UserError: its tokens are not there."""
        self.refuse()

    def origins(self, shard: int) -> Origins:
        """Raise UserError: its documents are not there."""
        self.refuse()

    def row_spans(self, row: int, seq_length: int) -> list[tuple[int, int]]:
        """Raise UserError: its tokens are not there."""
        self.refuse()

    def refuse(self) -> NoReturn:
        """Raise UserError, which says that it is gone."""
        raise UserError(
            f"the token store {self.path} is gone, and what is asked for was read from it",
            hint="bring the folder back, or ask about samples that other stores hold",
        )
