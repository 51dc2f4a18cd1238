"""Writing stores: the three files of one shard side by side, and whole stores from tokens that already exist."""

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from datakit.files.durable import FileDigest, write_durably, writing
from datakit.format.manifest import STORE_DTYPES, Manifest
from datakit.format.origins import OriginsWriter
from datakit.format.shard import ShardWriter
from datakit.format.shard_entry import ShardEntry
from datakit.store.token_store import TokenStore
from datakit.tokenization.identity import TokenizerIdentity
from threefold.closing import Making
from threefold.errors import UserError
from threefold.storage.folders import make_folders, sync_way

MAX_UINT16_VOCAB = 65500
MAX_SHARD_DOCUMENTS = 1 << 20
MAX_SHARD_BYTES = 1 << 30


def store_dtype(vocab_size: int) -> str:
    """Return the dtype of a store's tokens: uint16 for vocabularies below 65,500, as in Megatron, else int32."""
    return "uint16" if vocab_size < MAX_UINT16_VOCAB else "int32"


class StoreShardWriter:
    """Writes the `.bin`, `.idx` and `.origin` of one shard; memory is 24 bytes a document and its sources' paths."""

    def __init__(
        self, stem: Path, dtype: str, max_documents: int = MAX_SHARD_DOCUMENTS, max_bytes: int = MAX_SHARD_BYTES
    ) -> None:
        self._stem, self._max_documents, self._max_bytes = stem, max_documents, max_bytes
        self._tokens = ShardWriter(stem, dtype)
        self._origins = OriginsWriter()

    @property
    def num_documents(self) -> int:
        """How many documents were added."""
        return self._tokens.num_documents

    @property
    def is_full(self) -> bool:
        """Return whether a next document belongs into a new shard."""
        return self.room([0]) == 0

    def room(self, lengths: Sequence[int]) -> int:
        """Return how many of the next documents, of these many tokens each, belong into this shard."""
        shard = self._tokens
        sizes_before = (shard.num_tokens + np.cumsum(lengths) - lengths) * shard.dtype.itemsize
        return min(int(np.count_nonzero(sizes_before < self._max_bytes)), self._max_documents - shard.num_documents)

    def add(self, tokens: bytes, path: str, offset_bytes: int, line: int) -> None:
        """Append one document: its tokens' little-endian bytes, its file, offset, and line from 0 in the work item."""
        self.extend(tokens, [len(tokens) // self._tokens.dtype.itemsize], path, [offset_bytes], [line])

    def extend(
        self, tokens: bytes, lengths: Sequence[int], path: str, offsets: Sequence[int], lines: Sequence[int]
    ) -> None:
        """Append documents of one file, one after the other: the bytes of all their tokens, and a column of each."""
        self._tokens.extend(tokens, lengths)
        itemsize = self._tokens.dtype.itemsize
        self._origins.extend(path, offsets, lines, tokens, [length * itemsize for length in lengths])

    def finish(self) -> ShardEntry:
        """Make all three files durable and return the manifest's entry for them; a failure removes them."""
        bin_digest, idx_digest = self._tokens.finish()
        content = self._origins.encode()
        try:
            write_durably(self._stem.with_suffix(".origin"), content)
        except BaseException:
            self.abandon()
            raise
        return ShardEntry(
            name=self._stem.name,
            num_documents=self.num_documents,
            num_tokens=self._tokens.num_tokens,
            first_line=0,
            bin=bin_digest,
            idx=idx_digest,
            origin=FileDigest.of(content),
        )

    def abandon(self) -> None:
        """Remove what was written."""
        self._tokens.abandon()
        self._stem.with_suffix(".origin").unlink(missing_ok=True)


class ShardSequence(Making):
    """The shards in a folder that documents go into one after the other: the next is opened where one is full.

    `name` makes the name of the n-th; each has at most `max_documents`. A `with` that ends by an exception removes all.
    """

    def __init__(
        self, folder: Path, dtype: str, name: Callable[[int], str], max_documents: int = MAX_SHARD_DOCUMENTS
    ) -> None:
        self._folder, self._dtype, self._name, self._max_documents = folder, dtype, name, max_documents
        self._open: StoreShardWriter | None = None
        self._finished: list[ShardEntry] = []

    def current(self) -> StoreShardWriter:
        """Return the shard that the next document belongs into."""
        if self._open is not None and self._open.is_full:
            self.finish()
        if self._open is None:
            stem = self._folder / self._name(len(self._finished))
            self._open = StoreShardWriter(stem, self._dtype, self._max_documents)
        return self._open

    def finish(self) -> list[ShardEntry]:
        """Make the open shard durable, and return the entries of all."""
        if self._open is not None:
            self._finished.append(self._open.finish())
            self._open = None
        return self._finished

    close = finish

    def abort(self) -> None:
        """Remove what was written."""
        if self._open is not None:
            self._open.abandon()
        for entry in self._finished:
            for name in entry.files():
                (self._folder / name).unlink(missing_ok=True)


def write_store(
    path: str | os.PathLike[str],
    documents: Iterable[Sequence[int] | npt.NDArray[np.integer]],
    *,
    vocab_size: int,
    eod_id: int | None = None,
    shard_documents: int = MAX_SHARD_DOCUMENTS,
) -> TokenStore:
    """Make a store of documents that are tokenized already, `shard_documents` of them a shard."""
    folder, dtype = Path(path), store_dtype(vocab_size)
    with writing(folder):
        make_folders(folder.parent)
        folder.mkdir()
        sync_way(folder)
    shards = ShardSequence(folder, dtype, "shard-{:06}-000".format, min(shard_documents, MAX_SHARD_DOCUMENTS))
    for number, document in enumerate(documents):
        tokens = np.asarray(document, dtype=np.int64)
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
            raise UserError(f"document {number}: tokens from {tokens.min()} to {tokens.max()}, vocabulary {vocab_size}")
        shards.current().add(tokens.astype(f"<{'u2' if STORE_DTYPES[dtype] == 2 else 'i4'}").tobytes(), "", 0, number)
    Manifest(dtype, TokenizerIdentity("none", "", vocab_size, None, eod_id), tuple(shards.finish())).write(folder)
    return TokenStore.open(folder)
