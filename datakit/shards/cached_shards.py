"""CachedShards: the shards of a store or an archive behind a URL, read through a cache of this machine.

Opening reads the manifest. A shard's `.idx` and `.origin` come at first use, whole; its tokens in blocks of about a
MiB, which end where stretches do that are known to be read together. Every byte is checked before it is in the cache.
The stream, its samples and cursors are those of the same store in a local folder.
"""

import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from datakit.files.durable import reading
from datakit.format.manifest import STORE_DTYPES
from datakit.format.origins import Origins
from datakit.format.shard import Int64s, RemoteShard, ShardIndex, Tokens, TokenShard
from datakit.shards import shard_tokens
from datakit.shards.block_cache import BlockCache, NotHeldError, shared_cache
from datakit.shards.document_places import BYTES_A_DOCUMENT, ColumnPlaces, encode_places
from datakit.shards.holdings import Kind
from datakit.shards.kept_open import Bound, KeptOpen
from datakit.shards.shard_file import FilePiece, ShardFile
from datakit.shards.shard_tokens import (
    NO_STRETCHES,
    ArchivedTokens,
    PlainTokens,
    ShardTokens,
    content_name,
    distinct,
)
from datakit.shards.store_source import SourceFile, StoreSource
from threefold.errors import CheckFailed, quoted
from threefold.masking import masked
from threefold.storage import Buffer

OPEN_TOKENS = Bound(4096)  # some dozen bytes a block each
CACHE_MIB = 10240
MAPPED_PART = 16  # blocks are mapped to be read if at least such a part of them is
BlockPlace = tuple[int, int]  # a shard, and a block of its tokens


class Block(NamedTuple):
    """A block of a shard's tokens; `name` is its name in the cache."""

    shards: "CachedShards"
    shard: int
    number: int
    name: str
    size_bytes: int


class CachedShards:
    """The shards behind a URL; safe to use from several threads.

    A forked process reads what is behind s3://, gs:// or az:// if its parent made no request yet: opening one is. Else
    the first block that it fetches is a StorageError. Pickled to a process that was not forked, it goes on.
    """

    is_mapped = is_gone = False

    def __init__(self, url: str, source: StoreSource, cache: BlockCache, stretch_tokens: int = 0) -> None:
        """Wrap what was read already; `CachedShards.open` is the usual way, and then `in_stretches_of`."""
        self.url, self.source, self.cache, self.stretch_tokens = url, source, cache, stretch_tokens
        self.path, self.manifest = Path(source.storage.url), source.manifest
        self.itemsize = STORE_DTYPES[self.manifest.dtype]
        self.token_starts = [0, *accumulate(self.manifest.shard_tokens)]
        self.document_starts = [0, *accumulate(self.manifest.shard_documents)]
        self._tokens: KeptOpen[int, ShardTokens] = KeptOpen(OPEN_TOKENS)
        self._shards: KeptOpen[int, TokenShard] = KeptOpen(cache.files)
        self._origins: KeptOpen[int, Origins] = KeptOpen(cache.files)
        self._open_blocks: KeptOpen[BlockPlace, ShardFile] = KeptOpen(cache.opened)
        self._mapped_blocks: KeptOpen[BlockPlace, npt.NDArray[np.uint8]] = KeptOpen(cache.mapped)

    @classmethod
    def open(cls, url: str, cache: str | os.PathLike[str], cache_mib: int = CACHE_MIB) -> "CachedShards":
        """Open the store or archive at a URL, with a cache of so many MiB in the folder `cache`.

        UserError if there is neither, or the cache is not a local folder; StorageError if nobody answers or the cache
        cannot be written. Processes and stores that name the same folder share it.
        """
        return cls(url, StoreSource.open(url), shared_cache(os.fspath(cache), cache_mib))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as URL and cache, which are opened again."""
        return CachedShards.open, (self.url, str(self.cache.place.absolute()), self.cache.folder.max_bytes >> 20)

    @property
    def place(self) -> str:
        """The URL as it was named, without a password."""
        return masked(self.url)

    @property
    def cached(self) -> "CachedShards":
        """These shards, which may be fetched ahead."""
        return self

    def shard(self, number: int) -> TokenShard:
        """Return the index of a shard, which fetches single documents; the most recently used ones stay open."""
        return self._shards.get(number, self._open_shard)

    def origins(self, number: int) -> Origins:
        """Return the origins of one shard's documents; few stay open."""
        return self._origins.get(number, self._open_origins)

    def read_small(self, name: str) -> bytes | None:
        """Return a small file beside the manifest, None if it is missing."""
        return self.source.read_small(name)

    def in_stretches_of(self, num_tokens: int) -> "CachedShards":
        """Return the same shards, of which stretches of so many tokens are read together, from the store's first on.

        Their blocks end where they do, if these are no smaller than a block and it is not an archive.
        """
        return CachedShards(self.url, self.source, self.cache, num_tokens)

    @property
    def places_bytes(self) -> int:
        """The bytes that `document_places` keeps in the cache."""
        return BYTES_A_DOCUMENT * self.manifest.num_documents

    def document_places(self) -> ColumnPlaces:
        """Return where all documents are, by a column of the cache, which is made of all indices if it is not there."""
        make = partial(encode_places, self.shard, self.token_starts, self.document_starts)
        name = f"{self.manifest.documents_fingerprint}-places-{self.places_bytes}"
        return ColumnPlaces(self.cache.memory(name, self.places_bytes, make, Kind.SHARED))

    def damaged(self, what: str) -> CheckFailed:
        """Return the error of a store that is not as it was written."""
        return CheckFailed(what, hint=f"datakit verify {quoted(self.place)}")

    def blocks(self, number: int, starts: Int64s, stops: Int64s) -> list[int]:
        """Return which blocks of a shard's tokens hold something of some ranges of bytes, sorted."""
        bounds = self.tokens_of(number).edges
        return _all_between(*_first_and_last(bounds, starts, stops), len(bounds))

    def stretches(self, number: int, starts: Int64s) -> list[int]:
        """Return in which stretches bytes of a shard's tokens are, sorted; they are counted from the store's first."""
        first, _ = self._bytes_of(number)
        found: list[int] = distinct((starts + first) // (self.stretch_tokens * self.itemsize)).tolist()
        return found

    def blocks_of_stretch(self, number: int, stretch: int) -> list[Block]:
        """Return the blocks of a shard's tokens that hold something of a stretch, or of the token after it."""
        first, end = self._bytes_of(number)
        size = self.stretch_tokens * self.itemsize
        start, stop = max(stretch * size, first), min(stretch * size + size + self.itemsize, end)
        return [
            self.block(number, each)
            for each in self.blocks(number, np.array([start]) - first, np.array([stop]) - first)
        ]

    def block(self, shard: int, number: int) -> Block:
        """Return what names a block in the cache."""
        tokens = self.tokens_of(shard)
        first, last = tokens.bounds[number : number + 2]
        return Block(self, shard, number, f"{tokens.content}-{first}-{last}", last - first)

    def fetch(self, block: Block) -> ShardFile:
        """Return the open file of a block, out of the cache or fetched into it."""
        return self.cache.get(block.name, block.size_bytes, partial(self._content_of, block))

    def fetch_run(self, run: Sequence[Block]) -> None:
        """Fetch blocks of a shard that follow each other into the cache, in one request if none of them is there."""
        [shard], first = {block.shard for block in run}, run[0].number
        tokens = self.tokens_of(shard)
        self.cache.fill(
            [(block.name, block.size_bytes) for block in run],
            lambda start, stop: tokens.fetch(first + start, first + stop),
        )

    def map_blocks(self, blocks: Iterable[Block]) -> None:
        """Map those blocks that are in the cache, so that whoever reads them need not."""
        new = [block for block in blocks if (block.shard, block.number) not in self._mapped_blocks]
        for block, memory in zip(new, self.cache.mapped_blocks([(block.name, block.size_bytes) for block in new])):
            if memory is not None:
                self._mapped_blocks.get((block.shard, block.number), lambda _: memory)  # noqa: B023

    def unmap(self, block: Block) -> None:
        """Keep a block mapped no longer than what is being read of it."""
        self._mapped_blocks.drop((block.shard, block.number))

    def mapped(self, number: int, starts: Int64s, stops: Int64s) -> tuple[Int64s, list[Any]] | None:
        """Return where ranges of bytes of a shard's tokens are in memory, and what keeps them there.

        They are in mapped blocks, and copied where they go over the end of one. A mapping keeps a block's room on the
        disk: None if the ranges are a small part of their blocks that are not mapped yet, or these may not be held.
        """
        bounds = self.tokens_of(number).edges
        firsts, lasts = _first_and_last(bounds, starts, stops)
        numbers = _all_between(firsts, lasts, len(bounds))
        if not self._is_mapped(number, numbers, (stops - starts).sum()):
            return None
        try:
            blocks = {block: self._mapped_blocks.get((number, block), self._map_block) for block in numbers}
        except NotHeldError:
            return None
        begins = np.zeros(len(bounds), np.int64)
        begins[numbers] = [block.ctypes.data for block in blocks.values()]
        addresses, memory = (begins - bounds)[firsts] + starts, list(blocks.values())
        for place in np.flatnonzero(firsts != lasts).tolist():
            parts = [
                blocks[block][max(0, starts[place] - bounds[block]) : stops[place] - bounds[block]]
                for block in range(firsts[place], lasts[place] + 1)
            ]
            memory.append(np.concatenate(parts))
            addresses[place] = memory[-1].ctypes.data
        return addresses, memory

    def sizes_to_map(self, number: int, starts: Int64s, stops: Int64s) -> Int64s:
        """Return the bytes of the blocks of some ranges of a shard's tokens, none if they would not be mapped."""
        blocks = self.blocks(number, starts, stops)
        is_mapped = self._is_mapped(number, blocks, (stops - starts).sum())
        return np.diff(self.tokens_of(number).edges)[blocks if is_mapped else []]

    def _is_mapped(self, number: int, blocks: list[int], num_bytes: int) -> bool:
        """Return whether blocks are mapped to read so many bytes of them."""
        new = [block for block in blocks if (number, block) not in self._mapped_blocks]
        return not new or num_bytes * MAPPED_PART >= np.diff(self.tokens_of(number).edges)[new].sum()

    def file_pieces(self, number: int, start: int, stop: int) -> Iterator[FilePiece]:
        """Yield the pieces of cached blocks that are bytes [start, stop) of a shard's tokens, in order."""
        tokens = self.tokens_of(number)
        block = bisect_right(tokens.bounds, start) - 1
        while start < stop:
            file = self._open_blocks.get((number, block), self._open_block, lambda file: file.is_kept)
            end = min(stop, tokens.bounds[block + 1])
            yield FilePiece(file, start - tokens.bounds[block], end - start)
            start, block = end, block + 1

    def read_tokens(self, number: int, start: int, stop: int) -> Tokens:
        """Return a copy of the tokens that are bytes [start, stop) of a shard."""
        parts = []
        for file, first, size in self.file_pieces(number, start, stop):
            with reading(file.path):
                parts.append(os.pread(file.descriptor, size, first))
            file.let_go()
        return np.frombuffer(b"".join(parts), np.dtype(self.manifest.dtype).newbyteorder("<"))

    def tokens(self, number: int, start: int, stop: int) -> Tokens:
        """Return a copy of the tokens [start, stop) of a shard."""
        return self.read_tokens(number, start * self.itemsize, stop * self.itemsize)

    def _bytes_of(self, number: int) -> tuple[int, int]:
        """Return the first byte of a shard's tokens among those of the store, and the one after the last."""
        first, end = self.token_starts[number : number + 2]
        return first * self.itemsize, end * self.itemsize

    def tokens_of(self, number: int) -> ShardTokens:
        """Return the blocks of a shard's tokens; what says where these are is fetched at first use."""
        return self._tokens.get(number, self._open_tokens)

    def _open_block(self, place: BlockPlace) -> ShardFile:
        return self.fetch(self.block(*place))

    def _map_block(self, place: BlockPlace) -> npt.NDArray[np.uint8]:
        block = self.block(*place)
        memory = self.cache.mapped_block(block.name, block.size_bytes, partial(self._content_of, block))
        if memory is None:
            raise NotHeldError
        return memory

    def _content_of(self, block: Block) -> Buffer:
        return self.tokens_of(block.shard).fetch(block.number, block.number + 1)[0]

    def _open_tokens(self, number: int) -> ShardTokens:
        [file, *_] = self._files_of(number)
        if file.packed:
            return ArchivedTokens(self.source, file)
        return PlainTokens(
            self.source, file, lambda: (self.shard(number).index, self.origins(number)), self._stretches_in(number)
        )

    def _stretches_in(self, number: int) -> Int64s:
        """Return the bytes inside a shard's tokens at which stretches begin that are read together."""
        size = self.stretch_tokens
        if size * self.itemsize < shard_tokens.BLOCK_BYTES:
            return NO_STRETCHES
        first, stop = self.token_starts[number : number + 2]
        return (np.arange(first // size * size + size, stop, size) - first) * self.itemsize

    def _open_shard(self, number: int) -> TokenShard:
        bin_file, file, _ = self._files_of(number)
        index = ShardIndex(Path(self.source.place_of(file)), self._mapped(file))
        entry = self.manifest.shards[number]
        found = index.dtype.name, index.num_documents, index.num_sequences
        expected = self.manifest.dtype, entry.num_documents, entry.num_documents
        if found != expected:
            raise self.damaged(
                f"{self.source.place_of(file)} has dtype, documents, sequences {found}, its manifest says {expected}"
            )
        return RemoteShard(
            index, Path(self.source.place_of(bin_file)), entry.num_tokens, partial(self.read_tokens, number)
        )

    def _open_origins(self, number: int) -> Origins:
        *_, file = self._files_of(number)
        entry = self.manifest.shards[number]
        origins = Origins(Path(self.source.place_of(file)), entry.first_line, self._mapped(file))
        if origins.num_documents != entry.num_documents:
            raise self.damaged(
                f"{self.source.place_of(file)} has {origins.num_documents} documents, "
                f"its manifest says {entry.num_documents}"
            )
        return origins

    def _mapped(self, file: SourceFile) -> memoryview:
        """Return a whole file, out of the cache or fetched into it."""
        digest = file.digest
        if not file.packed:  # each block of the shard is checked by it
            self.cache.needed.add(content_name(digest))
        read = partial(self.source.checked, file, lambda source: source.content(file))
        return self.cache.memory(content_name(digest), digest.size_bytes, read).data

    def _files_of(self, number: int) -> list[SourceFile]:
        """Return the files of a shard: tokens, index, origins."""
        return self.source.files[3 * number : 3 * number + 3]


def _first_and_last(bounds: Int64s, starts: Int64s, stops: Int64s) -> tuple[Int64s, Int64s]:
    """Return of each of the ranges [starts[i], stops[i]), none of which is empty, the parts between bounds it is in."""
    return np.searchsorted(bounds, starts, side="right") - 1, np.searchsorted(bounds, stops - 1, side="right") - 1


def _all_between(firsts: Int64s, lasts: Int64s, most: int) -> list[int]:
    """Return the numbers below `most` that are from firsts[i] to lasts[i] for any i, sorted."""
    changes = np.bincount(firsts, minlength=most + 1) - np.bincount(lasts + 1, minlength=most + 1)
    found: list[int] = np.flatnonzero(np.cumsum(changes)).tolist()
    return found
