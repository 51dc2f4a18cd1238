"""PackedStore: a token store whose rows are those of a packing index; documents, origins and tokens are the store's."""

import os
from functools import partial
from pathlib import Path
from typing import Any

from datakit.format.shard import Int64s
from datakit.packing.packing_index import PackingIndex, Piece, default_folder
from datakit.store.token_store import Reading, TokenStore
from threefold.errors import UserError, quoted


class PackedStore(TokenStore):
    """A store and its index; `fingerprint` identifies the rows too, so it differs from the store's own."""

    index: PackingIndex

    @property
    def packing(self) -> str:
        """How documents become rows."""
        return self.index.record.packing

    @classmethod
    def of(
        cls,
        path: str | os.PathLike[str],
        *,
        packing: str,
        seq_length: int,
        index: str | os.PathLike[str] | None = None,
        reading: Reading = "mmap",
    ) -> "PackedStore":
        """Open a store with the index that `datakit pack` made of it, there or in the folder `index`.

        UserError if there is none, or it is of another store, packing or length; CheckFailed if it is damaged.
        """
        store = cls.open(path, reading=reading)
        assert isinstance(store, cls), "open makes what it is called on"
        folder = default_folder(path, packing, seq_length) if index is None else Path(index)
        store.index = PackingIndex.open(folder, store, packing=packing, seq_length=seq_length)
        store.fingerprint = store.index.fingerprint
        return store

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as paths; whoever unpickles it opens store and index there, and checks that they are the same."""
        record = self.index.record
        paths = os.path.abspath(self.path), os.path.abspath(self.index.folder)
        return partial(_reopen, *paths, record.packing, record.seq_length, self.fingerprint, self.reading), ()

    def num_rows(self, seq_length: int) -> int:
        """Return the rows of the index; UserError if they are not of `seq_length` tokens."""
        record = self.index.record
        if seq_length != record.seq_length:
            raise UserError(
                f"{self.index.folder} has rows of {record.seq_length} tokens, not {seq_length}",
                hint=f"datakit pack {quoted(self.path)} --seq-length {seq_length} --packing {record.packing}",
            )
        return record.num_rows

    def in_rows_of(self, seq_length: int) -> TokenStore:
        """Return the store with the index in it that has rows of so many tokens; errors as of `of`."""
        record = self.index.record
        if seq_length == record.seq_length:
            return self
        return type(self).of(self.path, packing=record.packing, seq_length=seq_length, reading=self.reading)

    def pieces(self, row: int) -> list[Piece]:
        """Return the pieces of documents in a row."""
        return self.index.row(row)

    def row_spans(self, row: int, seq_length: int) -> list[tuple[int, int]]:
        """Return the token addresses [start, stop) that a row reads; a piece reads its last label too."""
        return [(piece.start, piece.start + piece.size + piece.goes_on) for piece in self.index.row(row)]

    def rows_of(self, document: int, seq_length: int) -> Int64s:
        """Return the rows that read tokens of a document."""
        begin = self.first_token(document)
        return self.index.rows_of(document, begin, begin + len(self.document(document)))


def open_store(
    path: str | os.PathLike[str],
    *,
    packing: str,
    seq_length: int,
    index: str | os.PathLike[str] | None = None,
    reading: Reading = "mmap",
) -> TokenStore:
    """Open a store whose documents become rows in this way; errors as of TokenStore.open and PackedStore.of."""
    if packing == "concat":
        return TokenStore.open(path, reading=reading)
    return PackedStore.of(path, packing=packing, seq_length=seq_length, index=index, reading=reading)


def _reopen(
    path: str, folder: str, packing: str, seq_length: int, fingerprint: str, reading: Reading = "mmap"
) -> PackedStore:
    store = PackedStore.of(path, packing=packing, seq_length=seq_length, index=folder, reading=reading)
    if store.fingerprint != fingerprint:
        raise UserError(f"{folder} is not the index that was pickled", hint=f"datakit verify {quoted(folder)}")
    return store
