"""PackedRows: the rows of a packing index, of a store in a folder or behind a URL; Packing: which of them.

The index of a folder is mapped. That of a store behind a URL may be in a local folder or behind a URL: it is fetched
whole into the store's cache when that is opened, and checked: 12 bytes a piece and 8 a row. Rows of best fit hold
documents from all over a window of the index, so a cache has to hold some windows, or the same bytes are fetched again
and again: `datakit pack --window-documents` makes them smaller.
"""

import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import xxhash

from datakit.format.shard import Int64s
from datakit.rows.packing_index import (
    PackingIndex,
    PackingRecord,
    checked,
    column_file,
    default_name,
    read_record,
)
from datakit.shards.cached_shards import CachedShards
from datakit.shards.holdings import Kind
from datakit.shards.shard_tokens import content_name
from datakit.shards.shards import Shards
from datakit.store.rows import Piece
from threefold.errors import CheckFailed, UserError, quoted
from threefold.storage import Storage
from threefold.storage.repeating import open_repeating
from threefold.storage.second_look import read_checked

_READ_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Packing:
    """Rows that `datakit pack` made of a store, by how it packed them: "best_fit" or "pad", and their tokens.

    Their index is in the store, or in the folder or at the URL `index`.
    """

    packing: str
    seq_length: int
    index: str | os.PathLike[str] | None = None

    def bound(self, shards: Shards) -> "PackedRows":
        """Return the rows; UserError if there are none such of the store, CheckFailed if their index is damaged."""
        cached, name = shards.cached, default_name(self.packing, self.seq_length)
        if cached is not None:
            place = f"{cached.url}/{name}" if self.index is None else os.fspath(self.index)
            return PackedRows(_fetched_index(place, cached, self), self, shards.place)
        if self.index is not None and "://" in os.fspath(self.index):
            raise UserError(
                f"the index {self.index} is fetched through a cache, and the store {shards.place} has none",
                hint="an index in a local folder, or the store by its URL",
            )
        folder = shards.path / name if self.index is None else Path(self.index)
        return PackedRows(
            PackingIndex.open(folder, shards, packing=self.packing, seq_length=self.seq_length), self, shards.place
        )


class PackedRows:
    """The rows of an open index; safe to read from several threads. `fingerprint` differs from the store's own."""

    is_contiguous = False

    def __init__(self, index: PackingIndex, asked: Packing, store: str) -> None:
        """Take an index, what it was asked for by, and the place of its store."""
        if asked.index is not None and "://" not in os.fspath(asked.index):
            asked = replace(asked, index=os.path.abspath(asked.index))
        self.index, self.choice, self._store = index, asked, store
        self.packing, self.fingerprint, self.place = asked.packing, index.record.fingerprint, str(index.folder)

    def of_length(self, seq_length: int) -> Packing | None:
        """Return what names the index in the store that has rows of so many tokens; None if it is this one."""
        return None if seq_length == self.index.record.seq_length else Packing(self.packing, seq_length)

    def num_rows(self, seq_length: int) -> int:
        """Return the rows of the index; UserError if they are not of `seq_length` tokens."""
        record = self.index.record
        if seq_length != record.seq_length:
            raise UserError(
                f"{self.place} has rows of {record.seq_length} tokens, not {seq_length}",
                hint=f"datakit pack {quoted(self._store)} --seq-length {seq_length} --packing {record.packing}",
            )
        return record.num_rows

    def pieces(self, row: int, seq_length: int) -> list[Piece]:
        """Return the pieces of documents in a row."""
        return self.index.row(row)

    def rows_of(self, document: int, tokens: range, seq_length: int) -> Int64s:
        """Return the rows that read tokens of a document."""
        return self.index.rows_of(document, tokens.start, tokens.stop)


def _fetched_index(place: str, shards: CachedShards, asked: Packing) -> PackingIndex:
    storage = open_repeating(place)
    record = checked(read_record(place), storage.url, shards, packing=asked.packing, seq_length=asked.seq_length)

    def map_column(name: str) -> memoryview:
        digest = record.files[name]
        fetch = partial(
            read_checked, storage, f"{storage.url}/{column_file(name)}", partial(_fetch, name=name, record=record)
        )
        return shards.cache.memory(content_name(digest), digest.size_bytes, fetch, Kind.SHARED).data

    return PackingIndex(storage.url, record, map_column)


def _fetch(storage: Storage, name: str, record: PackingRecord) -> bytes:
    """Return a column; CheckFailed if it is not there, or not as it was written."""
    key, digest = column_file(name), record.files[name]
    info = storage.info(key)
    if info is None or info.size_bytes != digest.size_bytes:
        what = "is missing" if info is None else f"has {info.size_bytes} bytes"
        raise CheckFailed(f"{storage.url}/{key} {what}, its record says {digest.size_bytes} bytes")
    ranges = [(at, min(at + _READ_BYTES, digest.size_bytes)) for at in range(0, digest.size_bytes, _READ_BYTES)]
    content = b"".join(bytes(part) for one in ranges for part in storage.read_ranges(key, [one]))
    if xxhash.xxh3_64_hexdigest(content) != digest.xxh3_64:
        raise CheckFailed(f"{storage.url}/{key} is damaged: its checksum does not hold")
    return content
