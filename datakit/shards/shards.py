"""Shards: where the bytes of a store's shards are, as one Protocol.

FolderShards has them in a folder, mapped or in open files. CachedShards has them behind a URL, and reads them through a
cache. GoneShards had them: what is left can be counted, and reading it is an error that says so.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from datakit.format.manifest import Manifest
from datakit.format.origins import Origins
from datakit.format.shard import Tokens, TokenShard
from datakit.shards.cached_shards import CachedShards
from datakit.shards.document_places import DocumentPlaces
from datakit.shards.shard_file import FilePiece
from threefold.errors import CheckFailed


class Shards(Protocol):
    """All shards of a store, pickled as the place to open; safe to use from several threads.

    `path` names files in messages. Shard k has the tokens [token_starts[k], token_starts[k + 1]) of the store, and its
    documents likewise.
    """

    @property
    def path(self) -> Path:
        """The folder, or what messages name it by."""

    @property
    def place(self) -> str:
        """What was opened: a path, or a URL without a password."""

    @property
    def manifest(self) -> Manifest:
        """The manifest."""

    @property
    def token_starts(self) -> list[int]:
        """The address of each shard's first token, and that after the last."""

    @property
    def document_starts(self) -> list[int]:
        """The number of each shard's first document, and that after the last."""

    @property
    def is_mapped(self) -> bool:
        """Whether rows are read out of mapped shards; others come from `file_pieces`, or are fetched."""

    @property
    def is_gone(self) -> bool:
        """Whether nothing can be read."""

    @property
    def cached(self) -> CachedShards | None:
        """These shards, if they are read through a cache and may be fetched ahead; else None."""

    def shard(self, number: int) -> TokenShard:
        """Return an open shard; the most recently used ones stay open."""

    def origins(self, number: int) -> Origins:
        """Return the origins of one shard's documents; few stay open."""

    def tokens(self, number: int, start: int, stop: int) -> Tokens:
        """Return the tokens [start, stop) of a shard, a view or a copy."""

    def file_pieces(self, number: int, start: int, stop: int) -> Iterable[FilePiece]:
        """Return the pieces of open files that are bytes [start, stop) of a shard's tokens, in order."""

    def read_small(self, name: str) -> bytes | None:
        """Return a small file beside the manifest, None if it is missing."""

    def in_stretches_of(self, num_tokens: int) -> "Shards":
        """Return the same shards, if they are fetched with blocks that end where stretches of so many tokens do."""

    def document_places(self) -> DocumentPlaces:
        """Return where all documents are, for a reader that takes them in any order."""

    def damaged(self, what: str) -> CheckFailed:
        """Return the error of a store that is not as it was written."""
