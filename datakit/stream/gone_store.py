"""GoneStore: a source of a stream whose folder is gone, of which the stream's record knows enough to count on.

Weights of 0 let a stream go on without it: how many rows it had, and which content, says all about the samples after.
"""

from pathlib import Path
from typing import Any, NoReturn

from datakit.store.manifest import Manifest
from datakit.store.origins import Origins
from datakit.store.shard import TokenShard
from datakit.store.token_store import TokenStore
from datakit.tokenization.identity import TokenizerIdentity
from threefold.errors import UserError

_UNKNOWN = TokenizerIdentity("", "", 0, None, None)


class GoneStore(TokenStore):
    """A store that can be counted on and not read."""

    def __init__(self, path: Path, fingerprint: str, num_tokens: int, packing: str) -> None:
        """Take what is known of it."""
        super().__init__(path, Manifest("int32", _UNKNOWN, ()))
        self.fingerprint, self.token_starts, self._packing = fingerprint, [0, num_tokens], packing

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as what is known of it."""
        return GoneStore, (self.path, self.fingerprint, self.num_tokens, self._packing)

    @property
    def packing(self) -> str:
        """How its documents became rows."""
        return self._packing

    @property
    def num_documents(self) -> int:
        """Raise UserError: nobody knows."""
        self.refuse()

    def num_rows(self, seq_length: int) -> int:
        """Return the rows that were recorded, which are of one length."""
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
