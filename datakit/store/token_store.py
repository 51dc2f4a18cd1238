"""TokenStore: shards of tokens and a manifest, read as one address space of tokens and of documents, and as rows.

What there is says the manifest, where its bytes are the Shards, and which tokens a row of a batch reads the Rows: any
of one with any of the other. Opening a folder costs O(shards), whatever these are; of a store behind a URL it reads the
manifest, and the rest comes at first use through a cache of this machine, checked before it is there. The stream, its
samples and cursors do not depend on where a store is.
"""

import os
from bisect import bisect_right
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np

from datakit.files.durable import FileDigest, url_behind
from datakit.format.manifest import FILE_NAME, STORE_DTYPES, Manifest
from datakit.format.origins import Origin, Origins
from datakit.format.shard import Int64s, Tokens, TokenShard
from datakit.format.shard_entry import ShardEntry
from datakit.format.tags import StoreTags
from datakit.format.tokenizer_copy import open_copy
from datakit.shards.block_cache import BlockCache
from datakit.shards.cached_shards import CACHE_MIB, CachedShards
from datakit.shards.folder_shards import FolderShards, Reading
from datakit.shards.shards import Shards
from datakit.store.rows import ConcatRows, Rows, RowsChoice
from datakit.tokenization.tokenizer import Tokenizer
from threefold.errors import CheckFailed, UserError, quoted

NO_EOD = -1


@final
class TokenStore:
    """An open store; safe to use from several threads.

    `fingerprint` identifies the tokens: it is equal for stores of equal content, wherever they are. That of rows, if
    they have one, identifies both.
    """

    def __init__(self, shards: Shards, rows: RowsChoice | None = None) -> None:
        """Wrap open shards, read in rows; `TokenStore.open` is the usual way."""
        self.shards, self.manifest, self.path = shards, shards.manifest, shards.path
        self.token_starts = shards.token_starts
        self.itemsize = STORE_DTYPES[self.manifest.dtype]  # bytes of a token on disk
        self.eod_or_none = NO_EOD if self.eod_id is None else self.eod_id
        self.rows: Rows = ConcatRows(self.num_tokens) if rows is None else rows.bound(shards)
        self.fingerprint = self.rows.fingerprint or self.manifest.fingerprint

    @classmethod
    def open(
        cls,
        place: str | os.PathLike[str],
        *,
        cache: str | os.PathLike[str] | None = None,
        cache_mib: int | None = None,
        reading: Reading | None = None,
        rows: RowsChoice | None = None,
    ) -> "TokenStore":
        """Open a store in a folder, or with a `cache` folder one behind a URL, which may be an archive too.

        `reading` is how rows of a folder are read, mapped unless it says so. `rows` is which rows batches read, by
        default the tokens one after the other. UserError if no store is there, or none of such rows, or for what does
        not go with the place; CheckFailed or StorageError if it is damaged. Processes and stores that name the same
        cache share it, and the least `cache_mib` holds.
        """
        name = os.fspath(place)
        if "://" not in name:
            if cache is not None or cache_mib is not None:
                raise UserError(
                    f"{name} is a folder, which is read without a cache",
                    hint="leave cache and cache_mib out, or name the store by its URL",
                )
            return cls(FolderShards.open(place, reading or "mmap"), rows)
        if cache is None:
            raise UserError(
                f"{name} is not a local folder, and no cache is named to read it through",
                hint=f"datakit unarchive {quoted(name)} --output STORE",
            )
        if reading is not None:
            raise UserError(
                f"reading {reading!r} is of stores in folders, and {name} is fetched through a cache",
                hint="leave reading out",
            )
        return cls(CachedShards.open(name, cache, CACHE_MIB if cache_mib is None else cache_mib), rows)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a place and rows; whoever unpickles it opens them there and checks that they are the same."""
        return _opened_again, (self.shards, self.rows.choice, self.manifest.fingerprint, self.fingerprint)

    @property
    def place(self) -> str:
        """The store's path or URL, without a password."""
        return self.shards.place

    @property
    def cache(self) -> BlockCache | None:
        """The cache that it is read through, None for a folder."""
        return self.shards.cached.cache if self.shards.cached else None

    @property
    def is_mapped(self) -> bool:
        """Whether rows are read out of mapped shards."""
        return self.shards.is_mapped

    @property
    def document_starts(self) -> list[int]:
        """The number of each shard's first document, and that after the last."""
        return self.shards.document_starts

    @property
    def num_tokens(self) -> int:
        """Tokens in the store."""
        return self.token_starts[-1]

    @property
    def num_documents(self) -> int:
        """Documents in the store."""
        return self.shards.document_starts[-1]

    @property
    def dtype(self) -> str:
        """The tokens' dtype on disk, "uint16" or "int32"."""
        return self.manifest.dtype

    @property
    def vocab_size(self) -> int:
        """Every token is below this."""
        return self.manifest.tokenizer.vocab_size

    @property
    def eod_id(self) -> int | None:
        """The token that ends documents, where the tokenizer has one."""
        return self.manifest.tokenizer.eod_id

    def shard(self, number: int) -> TokenShard:
        """Return an open shard; the most recently used ones stay open."""
        return self.shards.shard(number)

    def tokens(self, start: int, stop: int) -> Tokens:
        """Return a copy of the tokens at addresses [start, stop) of the store, over shard borders."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens [{start}, {stop}) of {self.num_tokens} in {self.place}")
        parts = []
        while start < stop:
            number, first = self.locate_token(start)
            end = min(stop, self.token_starts[number + 1])
            parts.append(self.shards.tokens(number, start - first, end - first))
            start = end
        return np.concatenate([np.empty(0, self.dtype), *parts])

    def document(self, number: int) -> Tokens:
        """Return the tokens of one document, as a view."""
        shard, first = self._locate_document(number)
        return self.shard(shard).document(number - first)

    def first_token(self, number: int) -> int:
        """Return the token address at which one document begins; the inverse of `document_at`."""
        shard, first = self._locate_document(number)
        opened = self.shard(shard)
        start = int(opened.index.pointers[number - first]) // opened.dtype.itemsize
        if not 0 <= start <= opened.num_tokens:
            raise self.shards.damaged(
                f"{opened.idx_path} is damaged: document {number - first} begins at token {start}"
            )
        return self.token_starts[shard] + start

    def shard_of(self, number: int) -> int:
        """Return the shard that holds one document."""
        return self._locate_document(number)[0]

    def origin(self, number: int) -> Origin:
        """Where one document came from."""
        shard, first = self._locate_document(number)
        return self.origins(shard)[number - first]

    @cached_property
    def tags(self) -> StoreTags:
        """The tags of its source files."""
        return StoreTags(self.manifest, self.path / FILE_NAME)

    def tag(self, number: int) -> str | None:
        """Return the tag of the file that one document came from, None if it has none."""
        return self.tags.of(self.shard_of(number), self.origin(number).path)

    def origins(self, shard: int) -> Origins:
        """Return the origins of one shard's documents; few stay open."""
        return self.shards.origins(shard)

    def locate_token(self, token: int) -> tuple[int, int]:
        """Return the shard that holds a token address, and the address of its first token."""
        return _locate(self.token_starts, token)

    def document_at(self, token: int) -> int:
        """Return the document that holds a token address: from a row of a batch back to its text."""
        if not 0 <= token < self.num_tokens:
            raise IndexError(f"token {token} of {self.num_tokens} in {self.path}")
        number, first = self.locate_token(token)
        shard = self.shard(number)
        offset_bytes = (token - first) * shard.dtype.itemsize
        inside = shard.index.sequence_at(offset_bytes)
        begin = int(shard.index.pointers[inside])
        end = begin + int(shard.index.lengths[inside]) * shard.dtype.itemsize
        if inside < 0 or not begin <= offset_bytes < end:  # whoever walks on by documents' ends must get on
            raise self.shards.damaged(f"{shard.idx_path} is damaged: no document holds token {token - first} of it")
        return self.document_starts[number] + inside

    @property
    def packing(self) -> str:
        """How documents become rows: `concat` is one after the other."""
        return self.rows.packing

    def num_rows(self, seq_length: int) -> int:
        """Return how many rows of so many tokens it has."""
        return self.rows.num_rows(seq_length)

    def in_rows_of(self, seq_length: int) -> "TokenStore":
        """Return the store to read rows of so many tokens from: itself, unless a record of others makes them."""
        choice = self.rows.of_length(seq_length)
        return self if choice is None else TokenStore(self.shards, choice)

    def in_stretches_of(self, num_tokens: int) -> "TokenStore":
        """Return the store of which stretches of so many tokens are read together: itself, if nobody fetches them."""
        shards = self.shards.in_stretches_of(num_tokens)
        return self if shards is self.shards else TokenStore(shards, self.rows.choice)

    def row_spans(self, row: int, seq_length: int) -> list[tuple[int, int]]:
        """Return the token addresses [start, stop) that a row reads, the label of its last token included."""
        return [(piece.start, piece.start + piece.size + piece.goes_on) for piece in self.rows.pieces(row, seq_length)]

    def token_at(self, row: int, column: int, seq_length: int) -> int:
        """Return the address of a token of a row, 0 to seq_length: the last is its last label. Padding has none."""
        for start, stop in self.row_spans(row, seq_length):
            if column < stop - start:
                return start + column
            column -= stop - start
        raise IndexError(f"row {row} of {self.place} has no token there")

    def rows_of(self, document: int, seq_length: int) -> Int64s:
        """Return the rows that read tokens of a document."""
        begin = self.first_token(document)
        return self.rows.rows_of(document, range(begin, begin + len(self.document(document))), seq_length)

    def open_tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer that made the store, by the store's own copy; None if it keeps none."""
        return open_copy(self.place, self.manifest.tokenizer_files, self.shards.read_small)

    def files(self, entry: ShardEntry) -> list[tuple[Path, FileDigest]]:
        """Return the files of one shard with their recorded sizes and checksums."""
        return [(self.path / name, digest) for name, digest in entry.files().items()]

    def _locate_document(self, number: int) -> tuple[int, int]:
        if not 0 <= number < self.num_documents:
            raise IndexError(f"document {number} of {self.num_documents} in {self.place}")
        return _locate(self.document_starts, number)


def open_made(place: str, manifest: Manifest) -> TokenStore:
    """Open the store that was just made in a folder; of one behind a URL there are the manifest and its counts."""
    return TokenStore(FolderShards(Path(place), manifest)) if url_behind(Path(place)) else TokenStore.open(place)


def _opened_again(shards: Shards, rows: RowsChoice | None, store_fingerprint: str, fingerprint: str) -> TokenStore:
    """Return a store that was pickled; CheckFailed or UserError if it, or its rows, are others by now."""
    current = shards.manifest.fingerprint
    if current != store_fingerprint:
        raise CheckFailed(
            f"{shards.place} is not the store that was pickled: its fingerprint is {current}, not {store_fingerprint}",
            hint=f"datakit inspect {quoted(shards.place)}",
        )
    store = TokenStore(shards, rows)
    if store.fingerprint != fingerprint:
        raise UserError(
            f"{store.rows.place} is not the index that was pickled", hint=f"datakit verify {quoted(store.rows.place)}"
        )
    return store


def _reopen(path: str, fingerprint: str, reading: Reading = "mmap") -> TokenStore:
    """Return a store that an older release pickled."""
    return _opened_again(FolderShards.open(path, reading), None, fingerprint, fingerprint)


def _locate(starts: list[int], address: int) -> tuple[int, int]:
    number = bisect_right(starts, address) - 1
    return number, starts[number]
