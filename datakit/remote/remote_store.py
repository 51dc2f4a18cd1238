"""RemoteStore: a token store or an archive behind a URL, whose tokens are read through a cache of this machine.

Opening reads the manifest. A shard's `.idx` and `.origin` come at first use, whole; its tokens in blocks of about a
MiB. Every byte is checked before it is in the cache. The stream, its samples and cursors are those of the same store in
a local folder.
"""

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from datakit.archives.store_source import SourceFile, StoreSource
from datakit.files.durable import FileDigest, reading
from datakit.remote.block_cache import BlockCache, shared_cache
from datakit.remote.shard_tokens import ArchivedTokens, PlainTokens, ShardTokens, block_at, path_of, twice
from datakit.store.kept_open import Bound, KeptOpen
from datakit.store.manifest import FILE_NAME
from datakit.store.origins import Origins
from datakit.store.shard import Int64s, ShardIndex, Tokens, TokenShard, map_open
from datakit.store.shard_file import OPEN_FILES, FilePiece, ShardFile
from datakit.store.token_store import TokenStore
from threefold.errors import CheckFailed, quoted
from threefold.masking import masked
from threefold.storage.repeating import open_repeating

OPEN_TOKENS = Bound(4096)  # some dozen bytes a block each
# what is open or mapped keeps its room on the disk when the cache drops it
OPEN_INDICES, OPEN_ORIGINS, OPEN_BLOCKS = Bound(64), Bound(64), Bound(min(32, OPEN_FILES.most))
_BLOCK_BITS = 32


class Block(NamedTuple):
    """A block of a shard's tokens; `name` is its name in the cache."""

    store: "RemoteStore"
    shard: int
    number: int
    name: str
    size_bytes: int


class RemoteShard(TokenShard):
    """The index of a shard behind a URL; of its tokens single documents are fetched."""

    def __init__(self, store: "RemoteStore", number: int, index: ShardIndex, bin_path: Path) -> None:
        self._bin, self.index = bin_path, index
        self.dtype, self.num_documents = index.dtype, index.num_documents
        self._store, self._number = store, number

    @property
    def num_tokens(self) -> int:
        """How many tokens the shard holds."""
        return self._store.manifest.shards[self._number].num_tokens

    def _sequence(self, number: int) -> Tokens:
        start = int(self.index.pointers[number])
        return self._store.read_tokens(
            self._number, start, start + int(self.index.lengths[number]) * self.dtype.itemsize
        )


class RemoteStore(TokenStore):
    """An open store behind a URL; safe to read from several threads.

    A forked process reads what is behind s3://, gs:// or az:// if its parent made no request yet: opening one is. Else
    the first block that it fetches is a StorageError. Pickled to a process that was not forked, it goes on.
    """

    def __init__(self, url: str, source: StoreSource, cache: BlockCache) -> None:
        """Wrap what was read already; `RemoteStore.at` is the usual way."""
        super().__init__(Path(source.storage.url), source.manifest, "pread")
        self.source, self.cache, self._url = source, cache, url
        self._edges = np.array(self.token_starts)
        self._tokens: KeptOpen[ShardTokens] = KeptOpen(OPEN_TOKENS)
        self._shards, self._origins = KeptOpen(OPEN_INDICES), KeptOpen(OPEN_ORIGINS)
        self._open_blocks: KeptOpen[ShardFile] = KeptOpen(OPEN_BLOCKS)

    @classmethod
    def at(cls, url: str, *, cache: str, cache_mib: int = 10240) -> "RemoteStore":
        """Open the store or archive at a URL, with a cache of so many MiB in the folder `cache`.

        UserError if there is neither, or the cache is not a local folder; StorageError if nobody answers or the cache
        cannot be written. Processes and stores that name the same folder share it.
        """
        return cls(url, StoreSource.open(url), shared_cache(cache, cache_mib))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as URL and cache; whoever unpickles it opens the store there and checks that it is the same one."""
        place = {"cache": str(self.cache.place.absolute()), "cache_mib": self.cache.max_bytes >> 20}
        return partial(_reopen, self._url, self.fingerprint, **place), ()

    @property
    def place(self) -> str:
        """The store's URL as it was named, without a password."""
        return masked(self._url)

    def blocks(self, spans: Int64s) -> list[tuple[int, int]]:
        """Return the blocks that hold tokens at some spans of addresses, [spans, 2]: shard and number in it, sorted."""
        starts, stops = spans[spans[:, 0] < spans[:, 1]].T
        found: list[tuple[int, int]] = []
        for number in _touched(self._edges, starts, stops):
            begin, end = self._edges[number : number + 2]
            inside = (starts < end) & (stops > begin)
            firsts, lasts = (np.clip(edge[inside], begin, end) - begin for edge in (starts, stops))
            bounds = np.array(self._tokens.get(number, self._open_tokens).bounds)
            touched = _touched(bounds, firsts * self.itemsize, lasts * self.itemsize)
            found += [(number, block) for block in touched]
        return found

    def block(self, shard: int, number: int) -> Block:
        """Return what names a block in the cache."""
        first, last = self._tokens.get(shard, self._open_tokens).bounds[number : number + 2]
        return Block(self, shard, number, f"{_content(self.manifest.shards[shard].bin)}-{first}-{last}", last - first)

    def fetch(self, block: Block) -> ShardFile:
        """Return the open file of a block, out of the cache or fetched into it."""
        tokens = self._tokens.get(block.shard, self._open_tokens)
        return self.cache.get(block.name, block.size_bytes, lambda: tokens.fetch(block.number, block.number + 1)[0])

    def fetch_run(self, run: Sequence[Block]) -> None:
        """Fetch blocks of a shard that follow each other into the cache, in one request if none of them is there."""
        [shard], first = {block.shard for block in run}, run[0].number
        tokens = self._tokens.get(shard, self._open_tokens)
        blocks = [(block.name, block.size_bytes) for block in run]
        self.cache.fill(blocks, lambda start, stop: tokens.fetch(first + start, first + stop))

    def file_pieces(self, number: int, start: int, stop: int) -> Iterator[FilePiece]:
        """Yield the pieces of cached blocks that are bytes [start, stop) of a shard's tokens, in order."""
        tokens = self._tokens.get(number, self._open_tokens)
        block = block_at(tokens, start)
        while start < stop:
            file = self._open_blocks.get(number << _BLOCK_BITS | block, self._fetch)
            end = min(stop, tokens.bounds[block + 1])
            yield FilePiece(file, start - tokens.bounds[block], end - start)
            start, block = end, block + 1

    def read_tokens(self, number: int, start: int, stop: int) -> Tokens:
        """Return a copy of the tokens that are bytes [start, stop) of a shard."""
        parts = []
        for file, first, size in self.file_pieces(number, start, stop):
            with reading(file.path):
                parts.append(os.pread(file.descriptor, size, first))
        return np.frombuffer(b"".join(parts), np.dtype(self.dtype).newbyteorder("<"))

    def tokens(self, start: int, stop: int) -> Tokens:
        """Return a copy of the tokens at addresses [start, stop) of the store, over shard borders."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens [{start}, {stop}) of {self.num_tokens} in {self.place}")
        parts = []
        while start < stop:
            number, first = self.locate_token(start)
            end = min(stop, self.token_starts[number + 1])
            parts.append(self.read_tokens(number, (start - first) * self.itemsize, (end - first) * self.itemsize))
            start = end
        return np.concatenate([np.empty(0, self.dtype), *parts])

    def _fetch(self, key: int) -> ShardFile:
        return self.fetch(self.block(key >> _BLOCK_BITS, key & (1 << _BLOCK_BITS) - 1))

    def _open_tokens(self, number: int) -> ShardTokens:
        [file, *_] = self._files_of(number)
        if file.packed:
            return ArchivedTokens(self.source, file)
        return PlainTokens(self.source, file, lambda: (self.shard(number).index, self.origins(number)))

    def _open_shard(self, number: int) -> TokenShard:
        bin_file, file, _ = self._files_of(number)
        index = ShardIndex(path_of(self.source, file), self._mapped(file))
        entry = self.manifest.shards[number]
        found = index.dtype.name, index.num_documents, index.num_sequences
        expected = self.dtype, entry.num_documents, entry.num_documents
        if found != expected:
            what = f"dtype, documents, sequences {found}, its manifest says {expected}"
            raise self._damaged(f"{self.source.place_of(file)} has {what}")
        return RemoteShard(self, number, index, path_of(self.source, bin_file))

    def _open_origins(self, number: int) -> Origins:
        *_, file = self._files_of(number)
        entry = self.manifest.shards[number]
        origins = Origins(path_of(self.source, file), entry.first_line, self._mapped(file))
        if origins.num_documents != entry.num_documents:
            what = f"{origins.num_documents} documents, its manifest says {entry.num_documents}"
            raise self._damaged(f"{self.source.place_of(file)} has {what}")
        return origins

    def _mapped(self, file: SourceFile) -> memoryview:
        """Map a whole file, out of the cache or fetched into it; it stays mapped when the cache drops it."""
        digest = file.digest
        if not file.packed:  # each block of the shard is checked by it
            self.cache.needed.add(_content(digest))
        read = partial(twice, lambda: b"".join(self.source.blocks(file)))
        cached = self.cache.get(_content(digest), digest.size_bytes, read)
        with reading(cached.path):
            return map_open(cached.descriptor)

    def _files_of(self, number: int) -> list[SourceFile]:
        """Return the files of a shard: tokens, index, origins."""
        return self.source.files[3 * number : 3 * number + 3]

    def _damaged(self, what: str) -> CheckFailed:
        return CheckFailed(what, hint=f"datakit verify {quoted(self.place)}")


def is_store(url: str) -> bool:
    """Return whether there is a store or an archive at a URL; StorageError if nobody answers."""
    return open_repeating(url).info(FILE_NAME) is not None


def _touched(bounds: Int64s, starts: Int64s, stops: Int64s) -> list[int]:
    """Return which of the parts between bounds hold something of the ranges [starts[i], stops[i]), sorted."""
    changes = np.zeros(len(bounds) + 1, np.int64)
    np.add.at(changes, np.searchsorted(bounds, starts, side="right") - 1, 1)
    np.subtract.at(changes, np.searchsorted(bounds, stops - 1, side="right"), 1)
    found: list[int] = np.flatnonzero(np.cumsum(changes)).tolist()
    return found


def _content(digest: FileDigest) -> str:
    """Return what names a file's content in the cache."""
    return f"{digest.xxh3_64}-{digest.size_bytes}"


def _reopen(url: str, fingerprint: str, **place: Any) -> RemoteStore:
    store = RemoteStore.at(url, **place)
    if store.fingerprint != fingerprint:
        what = f"{url} is not the store that was pickled: its fingerprint is {store.fingerprint}, not {fingerprint}"
        raise CheckFailed(what, hint=f"datakit inspect {quoted(url)}")
    return store
