"""RecordedRows: rows of a store that is gone, as the record of a stream knows them: counted, and not read."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from datakit.format.shard import Int64s
from datakit.shards.gone_shards import GoneShards
from datakit.shards.shards import Shards
from datakit.store.rows import Piece
from datakit.store.token_store import TokenStore

_NOT_KNOWN = "", 1


@dataclass(frozen=True)
class RecordedRows:
    """What is known of rows by their length, the fingerprint and how many, read in rows of `seq_length`."""

    shards: GoneShards
    known: Mapping[int, tuple[str, int]]
    packing: str
    seq_length: int
    place = ""

    def bound(self, shards: Shards) -> "RecordedRows":
        """Return these rows."""
        return self

    @property
    def choice(self) -> "RecordedRows":
        """These rows."""
        return self

    @property
    def fingerprint(self) -> str:
        """What was recorded of the rows that are read."""
        return self.known.get(self.seq_length, _NOT_KNOWN)[0]

    @property
    def is_contiguous(self) -> bool:
        """Whether they were one after the other."""
        return self.packing == "concat"

    def of_length(self, seq_length: int) -> "RecordedRows | None":
        """Return what is known of rows of another length."""
        return None if seq_length == self.seq_length else replace(self, seq_length=seq_length)

    def num_rows(self, seq_length: int) -> int:
        """Return the rows that were recorded of the length that they are read in."""
        return self.known.get(self.seq_length, _NOT_KNOWN)[1]

    def pieces(self, row: int, seq_length: int) -> list[Piece]:
        """Raise UserError: the tokens are not there."""
        self.shards.refuse()

    def rows_of(self, document: int, tokens: range, seq_length: int) -> Int64s:
        """Raise UserError: the documents are not there."""
        self.shards.refuse()


def gone_store(path: str, known: Mapping[int, tuple[str, int]], packing: str, seq_length: int) -> TokenStore:
    """Return a store that can be counted on and not read, given what is known of its rows by their length."""
    counts = {length: num_rows for length, (_, num_rows) in known.items()} or {seq_length: 1}
    shards = GoneShards(Path(path), max(length * num_rows for length, num_rows in counts.items()) + 1)
    return TokenStore(shards, RecordedRows(shards, dict(known), packing, seq_length))
