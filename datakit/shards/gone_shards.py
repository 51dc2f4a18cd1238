"""GoneShards: the shards of a stream's source whose folder is gone, of which the stream's record knows the number.

Weights of 0 let a stream go on without it: how many rows it had, and which content, says all about the samples after.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from datakit.format.manifest import Manifest
from datakit.tokenization.identity import TokenizerIdentity
from threefold.errors import UserError

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

    def in_stretches_of(self, num_tokens: int) -> "GoneShards":
        """Return these shards, which nobody fetches."""
        return self

    def __getattr__(self, name: str) -> Any:
        """Raise UserError for all that other shards have: documents, tokens and files are not there."""
        if name.startswith("_"):
            raise AttributeError(name)
        self.refuse()

    def refuse(self) -> NoReturn:
        """Raise UserError, which says that they are gone."""
        raise UserError(
            f"the token store {self.path} is gone, and what is asked for was read from it",
            hint="bring the folder back, or ask about samples that other stores hold",
        )
