"""GoneShards: the shards of a stream's source whose folder is gone, of which the stream's record knows the number.

Weights of 0 let a stream go on without it: how many rows it had, and which content, says all about the samples after.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from datakit.format.manifest import Manifest
from datakit.format.origins import Origins
from datakit.format.shard import Tokens, TokenShard
from datakit.shards.document_places import DocumentPlaces
from datakit.shards.shard_file import FilePiece
from datakit.tokenization.identity import TokenizerIdentity
from threefold.errors import CheckFailed, UserError

_UNKNOWN = Manifest("int32", TokenizerIdentity("", "", 0, None, None), ())


@dataclass(frozen=True)
class GoneShards:
    """Shards that can be counted on and not read: of `num_tokens` tokens, as far as rows were recorded."""

    path: Path
    num_tokens: int
    manifest, is_mapped, is_gone, cached = _UNKNOWN, True, True, None

    @property
    def place(self) -> str:
        """The path at which they were."""
        return str(self.path)

    @property
    def token_starts(self) -> list[int]:
        """The tokens of one shard."""
        return [0, self.num_tokens]

    @property
    def document_starts(self) -> list[int]:
        """Raise UserError: nobody knows."""
        self.refuse()

    def shard(self, number: int) -> TokenShard:
        """Raise UserError: its tokens are not there."""
        self.refuse()

    def origins(self, number: int) -> Origins:
        """Raise UserError: its documents are not there."""
        self.refuse()

    def tokens(self, number: int, start: int, stop: int) -> Tokens:
        """Raise UserError: its tokens are not there."""
        self.refuse()

    def file_pieces(self, number: int, start: int, stop: int) -> Iterable[FilePiece]:
        """Raise UserError: its files are not there."""
        self.refuse()

    def read_small(self, name: str) -> bytes | None:
        """Raise UserError: its files are not there."""
        self.refuse()

    def in_stretches_of(self, num_tokens: int) -> "GoneShards":
        """Return these shards, which nobody fetches."""
        return self

    def document_places(self) -> DocumentPlaces:
        """Raise UserError: its documents are not there."""
        self.refuse()

    def damaged(self, what: str) -> CheckFailed:
        """Return the error of a store that is not as it was written."""
        return CheckFailed(what)

    def refuse(self) -> NoReturn:
        """Raise UserError, which says that they are gone."""
        raise UserError(
            f"the token store {self.path} is gone, and what is asked for was read from it",
            hint="bring the folder back, or ask about samples that other stores hold",
        )
