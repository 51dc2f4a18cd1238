"""TokenStore: a folder of token shards and a manifest, read as one address space of tokens and of documents.

Opening reads the manifest and checks that all shards' files have their sizes: O(shards), whatever these are. If there
are more than `CHECKED_AT_ONCE`, a thread does so beside the first reads; a later read raises what it found. Shards are
mapped at first use, without a descriptor. All stores of a process together keep at most `OPEN_SHARDS.most` of them
mapped, so that any number of stores of any size fits its limits. Of a store that is opened with `reading="pread"` the
rows of batches are read from open files instead, of which `OPEN_FILES.most` are kept.
"""

import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np

from datakit.files.durable import FileDigest, url_behind
from datakit.files.durable import reading as reading_file
from datakit.format.manifest import FILE_NAME, STORE_DTYPES, Manifest, is_plain_folder, require_folder
from datakit.format.origins import Origin, Origins
from datakit.format.shard import Int64s, Tokens, TokenShard
from datakit.format.shard_entry import ScannedShards, ShardEntry
from datakit.format.tags import StoreTags
from datakit.format.tokenizer_copy import open_copy
from datakit.shards.kept_open import Bound, KeptOpen
from datakit.shards.shard_file import OPEN_FILES, FilePiece, ShardFile
from datakit.tokenization.tokenizer import Tokenizer
from threefold.errors import CheckFailed, StorageError, UserError, quoted
from threefold.storage.file_systems import is_remote

NO_EOD = -1
OPEN_SHARDS = Bound(8192)  # two mappings each; Linux allows a process 65,530
Reading = Literal["auto", "mmap", "pread"]  # auto: pread on file systems of other machines
CHECKED_AT_ONCE = 1024  # shards, about 2 ms
OPEN_ORIGINS = Bound(8)  # their tables of sources, once read, may be large


class TokenStore:
    """An open store; safe to read from several threads.

    `fingerprint` identifies the tokens: it is equal for stores of equal content, wherever they are.
    """

    def __init__(self, path: Path, manifest: Manifest, reading: Reading = "mmap") -> None:
        """Wrap a manifest that was read from `path`; `TokenStore.open` is the usual way."""
        self.path, self.manifest, self.reading = path, manifest, reading
        # whether rows are read out of mapped shards, those of others come from `file_pieces`; bytes of a token on disk
        self.is_mapped = reading == "mmap" or (reading == "auto" and not is_remote(path))
        self.itemsize = STORE_DTYPES[manifest.dtype]
        self.eod_or_none = NO_EOD if self.eod_id is None else self.eod_id
        self.fingerprint = manifest.fingerprint
        self.token_starts = [0, *accumulate(manifest.shard_tokens)]
        self.document_starts = [0, *accumulate(manifest.shard_documents)]
        # bytes of a file beside the manifest, None if it is missing
        self.read_small: Callable[[str], bytes | None] = partial(_read_small, path)
        self._faults: list[UserError] = []  # of files' sizes, if they are looked at beside what the store is used for
        self._shards: KeptOpen[TokenShard] = KeptOpen(OPEN_SHARDS)
        self._origins: KeptOpen[Origins] = KeptOpen(OPEN_ORIGINS)
        self._files: KeptOpen[ShardFile] = KeptOpen(OPEN_FILES)

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, reading: Reading = "mmap") -> "TokenStore":
        """Open a store; UserError if there is none, CheckFailed or StorageError if it is damaged."""
        folder = Path(path)
        store = cls(folder, Manifest.read(folder), reading)
        if len(store.manifest.shards) <= CHECKED_AT_ONCE:
            check_sizes(folder, store.manifest)
        else:
            find = partial(_find_faults, folder, store.manifest, store._faults)
            threading.Thread(target=find, name="datakit-sizes", daemon=True).start()
        return store

    @property
    def place(self) -> str:
        """The store's path, or the URL of one that was made behind it."""
        return url_behind(self.path) or str(self.path)

    @property
    def num_tokens(self) -> int:
        """Tokens in the store."""
        return self.token_starts[-1]

    @property
    def num_documents(self) -> int:
        """Documents in the store."""
        return self.document_starts[-1]

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

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a path; whoever unpickles it opens the store there and checks that it is the same one."""
        return _reopen, (os.path.abspath(self.path), self.fingerprint, self.reading)

    def shard(self, number: int) -> TokenShard:
        """Return an open shard; the most recently used ones stay mapped."""
        if self._faults:
            raise self._faults[0]
        return self._shards.get(number, self._open_shard)

    def file_pieces(self, number: int, start: int, stop: int) -> Iterable[FilePiece]:
        """Return the pieces of open files that are bytes [start, stop) of a shard's tokens, in order."""
        if self._faults:
            raise self._faults[0]
        return [FilePiece(self._files.get(number, self._open_file), start, stop - start)]

    def tokens(self, start: int, stop: int) -> Tokens:
        """Return a copy of the tokens at addresses [start, stop) of the store, over shard borders."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens [{start}, {stop}) of {self.num_tokens} in {self.path}")
        found = np.empty(stop - start, self.dtype)
        at = start
        while at < stop:
            number, first = self.locate_token(at)
            part = self.shard(number).tokens[at - first : stop - first]
            found[at - start : at - start + len(part)] = part
            at += len(part)
        return found

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
            raise self._damaged(f"{opened.idx_path} is damaged: document {number - first} begins at token {start}")
        return self.token_starts[shard] + start

    def shard_of(self, number: int) -> int:
        """Return the shard that holds one document."""
        shard, _ = self._locate_document(number)
        return shard

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
        return self._origins.get(shard, self._open_origins)

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
            raise self._damaged(f"{shard.idx_path} is damaged: no document holds token {token - first} of it")
        return self.document_starts[number] + inside

    @property
    def packing(self) -> str:
        """How documents become rows: `concat` is one after the other."""
        return "concat"

    def num_rows(self, seq_length: int) -> int:
        """Return how many rows of so many tokens the store's tokens make, one after the other."""
        return max(0, (self.num_tokens - 1) // seq_length)

    def in_rows_of(self, seq_length: int) -> "TokenStore":
        """Return the store to read rows of so many tokens from: itself, unless an index makes its rows."""
        return self

    def row_spans(self, row: int, seq_length: int) -> list[tuple[int, int]]:
        """Return the token addresses [start, stop) that a row reads, the label of its last token included.

        Rows 0 and 1 of 4 tokens read [0, 5) and [4, 9).
        """
        return [(row * seq_length, (row + 1) * seq_length + 1)]

    def token_at(self, row: int, column: int, seq_length: int) -> int:
        """Return the address of a token of a row, 0 to seq_length: the last is its last label. Padding has none."""
        for start, stop in self.row_spans(row, seq_length):
            if column < stop - start:
                return start + column
            column -= stop - start
        raise IndexError(f"row {row} of {self.path} has no token there")

    def rows_of(self, document: int, seq_length: int) -> Int64s:
        """Return the rows that read tokens of a document."""
        begin = self.first_token(document)
        stop = begin + len(self.document(document))
        first, last = max(0, -(-begin // seq_length) - 1), min((stop - 1) // seq_length, self.num_rows(seq_length) - 1)
        return np.arange(first, last + 1 if stop > begin else first)

    def open_tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer that made the store, by the store's own copy; None if it keeps none."""
        return open_copy(self.place, self.manifest.tokenizer_files, self.read_small)

    def files(self, entry: ShardEntry) -> list[tuple[Path, FileDigest]]:
        """Return the files of one shard with their recorded sizes and checksums."""
        return [(self.path / name, digest) for name, digest in entry.files().items()]

    def _open_origins(self, number: int) -> Origins:
        require_folder(self.path)
        entry = self.manifest.shards[number]
        origins = Origins(self.path / f"{entry.name}.origin", entry.first_line)
        if origins.num_documents != entry.num_documents:
            what = f"{origins.path} has {origins.num_documents} documents, its manifest says {entry.num_documents}"
            raise self._damaged(what)
        return origins

    def _open_shard(self, number: int) -> TokenShard:
        require_folder(self.path)
        entry = self.manifest.shards[number]
        shard = TokenShard(f"{self.path}/{entry.name}")
        found = shard.dtype.name, shard.num_documents, shard.index.num_sequences, shard.num_tokens
        expected = self.dtype, entry.num_documents, entry.num_documents, entry.num_tokens
        if found != expected:
            raise self._damaged(
                f"{shard.idx_path} has dtype, documents, sequences, tokens {found}, its manifest says {expected}"
            )
        return shard

    def _open_file(self, number: int) -> ShardFile:
        require_folder(self.path)
        entry = self.manifest.shards[number]
        return ShardFile.open(self.path / f"{entry.name}.bin", entry.bin.size_bytes)

    def _damaged(self, what: str) -> CheckFailed:
        return CheckFailed(what, hint=f"datakit verify {quoted(self.path)}")

    def _locate_document(self, number: int) -> tuple[int, int]:
        if not 0 <= number < self.num_documents:
            raise IndexError(f"document {number} of {self.num_documents} in {self.path}")
        return _locate(self.document_starts, number)


def _read_small(folder: Path, name: str) -> bytes | None:
    require_folder(folder)
    with reading_file(folder / name):
        return (folder / name).read_bytes() if (folder / name).is_file() else None


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Raise StorageError or CheckFailed if a file of a shard is not there or has another size than in the manifest."""
    shards, prefix = manifest.shards, f"{folder}/"  # a Path for each file would be half of the time
    for entry in shards.misfits(prefix) if isinstance(shards, ScannedShards) else shards:
        for name, digest in entry.files().items():
            try:
                size_bytes = os.stat(prefix + name).st_size
            except OSError as error:
                verb = "verify {}" if is_plain_folder(str(folder)) else "unarchive {} --output STORE"
                hint = f"datakit {verb.format(quoted(folder))}"
                raise StorageError(f"cannot read {folder / name}: {error.strerror}", hint=hint) from error
            if size_bytes != digest.size_bytes:
                what = f"{folder / name} has {size_bytes} bytes, its manifest says {digest.size_bytes}"
                raise CheckFailed(what, hint=f"datakit verify {quoted(folder)}")


def _find_faults(folder: Path, manifest: Manifest, faults: list[UserError]) -> None:
    """Put what `check_sizes` raises into a list, on a thread that leaves processors to others."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    try:
        check_sizes(folder, manifest)
    except UserError as error:
        faults.append(error)


def open_made(place: str, manifest: Manifest) -> TokenStore:
    """Open the store that was just made in a folder; of one behind a URL there are the manifest and its counts."""
    return TokenStore(Path(place), manifest) if url_behind(Path(place)) else TokenStore.open(place)


def _reopen(path: str, fingerprint: str, reading: Reading = "mmap") -> TokenStore:
    store = TokenStore.open(path, reading=reading)
    if store.fingerprint != fingerprint:
        what = f"{path} is not the store that was pickled: its fingerprint is {store.fingerprint}, not {fingerprint}"
        raise CheckFailed(what, hint=f"datakit inspect {quoted(path)}")
    return store


def _locate(starts: list[int], address: int) -> tuple[int, int]:
    number = bisect_right(starts, address) - 1
    return number, starts[number]
