"""Verify: every file of a store against its manifest, and where damage is found, the documents that it is in.

A clean store costs one sequential read of its files, on a few threads, and memory of one block each. The documents of a
damaged file are found by arithmetic (`.idx`) and by the checks that the `.origin` file keeps for each document
(`.bin`, `.origin`). An archive, or a store at a URL, is streamed from where it is, on the same few threads; there the
damaged frames are named, not the documents. Memory is then some 20 MiB a thread.
"""

import os
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from datakit.files.durable import FileDigest, reading
from datakit.format.manifest import ARCHIVE_NAME, FILE_NAME, Manifest, is_plain_folder
from datakit.format.shard import HEADER, ShardIndex
from datakit.format.shard_entry import ShardEntry
from datakit.rows.packed_rows import COLUMNS, column_path, read_record
from datakit.shards.folder_shards import FolderShards
from datakit.shards.store_source import SourceFile, StoreSource
from datakit.store.token_store import TokenStore
from threefold.errors import CheckFailed, StorageError
from threefold.storage import Storage, open_storage

MAX_NAMED_DOCUMENTS = MAX_NAMED_FRAMES = 10
_BLOCK_BYTES = 1 << 20  # stays in the processor's cache while it is hashed and searched
_MAX_THREADS = 8


@dataclass(frozen=True, slots=True)
class Fault:
    """Something wrong with one file: what, and the store's documents that it touches, as far as they are known."""

    file: str
    message: str
    documents: tuple[int, ...] = ()

    def __str__(self) -> str:
        if not self.documents:
            return f"{self.file}: {self.message}"
        names = ", ".join(map(str, self.documents[:MAX_NAMED_DOCUMENTS]))
        more = f" and {len(self.documents) - MAX_NAMED_DOCUMENTS} more" * (len(self.documents) > MAX_NAMED_DOCUMENTS)
        return f"{self.file}: {self.message}, document {names}{more}"


def verify(path: str | os.PathLike[str]) -> list[Fault]:
    """All faults of a store, an archive, in a folder or at a URL, or a packing index, none for a sound one; CheckFailed
    if its manifest or record is damaged.
    """
    if not is_plain_folder(os.fspath(path)):
        source = StoreSource.open(os.fspath(path))
        with _threads() as pool:
            faults = [fault for fault in pool.map(lambda file: _source_fault(source, file), source.files) if fault]
        return [*_record_faults(source.storage), *_copy_faults(source), *faults]
    folder = Path(path)
    if (index := read_record(folder)) is not None:
        return list(_file_faults({column_path(folder, name): index.files[name] for name in COLUMNS}))
    store = TokenStore(FolderShards(folder, Manifest.read(folder)))
    copy = {folder / name: digest for name, digest in store.manifest.tokenizer_files.items()}
    record_faults = [*_record_faults(open_storage(folder)), *_file_faults(copy)]

    with _threads() as pool:
        shards = pool.map(lambda number: list(_shard_faults(store, number)), range(len(store.manifest.shards)))
        return record_faults + [fault for faults in shards for fault in faults]


def _file_faults(files: Mapping[Path, FileDigest]) -> Iterator[Fault]:
    """Yield what is wrong with the bytes of files."""
    for file, digest in files.items():
        if message := _file_fault(file, digest, None):
            yield Fault(str(file), message)


def _record_faults(storage: Storage) -> Iterator[Fault]:
    """Yield what is beside the JSON object of a record, which no checksum covers."""
    for name in (FILE_NAME, ARCHIVE_NAME):
        content = storage.read(name) if storage.info(name) else b"\n"
        expected = content.strip() + b"\n"
        if content != expected:
            yield Fault(f"{storage.url}/{name}", f"has {len(content)} bytes, {len(expected)} expected")


def _copy_faults(source: StoreSource) -> Iterator[Fault]:
    """Yield what is wrong with the files of the store's copy of its tokenizer."""
    for name, digest in source.manifest.tokenizer_files.items():
        place = f"{source.storage.url}/{name}"
        try:
            source.copied(name, digest)
        except CheckFailed as error:
            yield Fault(place, error.message.removeprefix(place).lstrip(": "))


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_MAX_THREADS, len(os.sched_getaffinity(0))))


def _shard_faults(store: TokenStore, number: int) -> Iterator[Fault]:
    entry, damaged = store.manifest.shards[number], dict[str, Fault]()
    largest = _Largest(store.dtype)
    for file, digest in store.files(entry):
        if message := _file_fault(file, digest, largest if file.suffix == ".bin" else None):
            damaged[file.suffix] = Fault(str(file), message)
    first = store.document_starts[number]
    for suffix, fault in damaged.items():
        documents = _damaged_documents(store, number, entry, suffix)
        yield Fault(fault.file, fault.message, tuple(first + document for document in documents))
    if not damaged:
        yield from _content_faults(store, number, entry, largest.token)


class _Largest:
    """The largest token seen; a negative one counts as larger than all others, being beyond every vocabulary too."""

    def __init__(self, dtype: str) -> None:
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._unsigned = np.dtype(f"<u{self._dtype.itemsize}")
        self._seen = self._unsigned.type(0)

    @property
    def token(self) -> int:
        return int(np.asarray(self._seen, self._unsigned).view(self._dtype))

    def add(self, block: memoryview) -> None:
        """See the whole tokens of a block."""
        tokens = np.frombuffer(block, self._unsigned, len(block) // self._unsigned.itemsize)
        self._seen = tokens.max(initial=self._seen)


def _file_fault(file: Path, digest: FileDigest, largest: _Largest | None) -> str | None:
    """Return what is wrong with the bytes of a file, None if nothing.

    In that pass the tokens of a `.bin` are looked at.
    """
    with reading(file):
        try:
            size_bytes = file.stat().st_size
            if size_bytes != digest.size_bytes:
                return f"has {size_bytes} bytes, its manifest says {digest.size_bytes}"
            hasher, block = xxhash.xxh3_64(), memoryview(bytearray(min(_BLOCK_BYTES, size_bytes)))
            with file.open("rb", buffering=0) as stream:
                while num_bytes := stream.readinto(block):
                    hasher.update(block[:num_bytes])
                    if largest:
                        largest.add(block[:num_bytes])
        except FileNotFoundError:
            return "is missing"
    return None if hasher.hexdigest() == digest.xxh3_64 else "is damaged: its checksum does not hold"


def _damaged_documents(store: TokenStore, number: int, entry: ShardEntry, suffix: str) -> list[int]:
    """Return the documents of a shard that damaged bytes of one of its files touch; none where that is not known."""
    try:
        if suffix == ".idx":
            return _damaged_in_index(ShardIndex(store.path / f"{entry.name}.idx"), entry)
        shard, origins = store.shard(number), store.origins(number)
        return [
            document
            for document in range(entry.num_documents)
            if not origins.holds(document, shard.document(document).tobytes())
        ]
    except (CheckFailed, StorageError):  # the other files cannot be opened either: the fault itself is reported
        return []


def _damaged_in_index(index: ShardIndex, entry: ShardEntry) -> list[int]:
    """Return the documents whose entries disagree with the rest of an index."""
    if not index.num_sequences == index.num_documents == entry.num_documents:
        return []
    size_bytes = index.lengths.astype(np.int64) * (entry.bin.size_bytes // max(entry.num_tokens, 1))
    ends = np.cumsum(size_bytes)
    if len(ends) and ends[-1] == entry.bin.size_bytes:  # the lengths are sound: the pointers follow them
        wrong = index.pointers != ends - size_bytes
    else:
        wrong = np.append(index.pointers[1:], entry.bin.size_bytes) - index.pointers != size_bytes
    numbers = np.arange(entry.num_documents)
    wrong |= (index.document_index[:-1] != numbers) | (index.document_index[1:] != numbers + 1)
    return list(map(int, np.flatnonzero(wrong)))


def _content_faults(store: TokenStore, number: int, entry: ShardEntry, largest: int) -> Iterator[Fault]:
    """Yield whether files with sound checksums also fit each other and the vocabulary."""
    try:
        shard = store.shard(number)
        store.origins(number)
    except CheckFailed as error:
        yield Fault(str(store.path / entry.name), error.message)
        return
    num_index_bytes = HEADER.size + 12 * entry.num_documents + 8 * (entry.num_documents + 1)
    if entry.idx.size_bytes != num_index_bytes:  # Megatron's own may go on, a store's does not
        yield Fault(str(shard.idx_path), f"has {entry.idx.size_bytes} bytes, {num_index_bytes} expected")
    if wrong := _damaged_in_index(shard.index, entry):
        yield Fault(str(shard.idx_path), "contradicts itself", tuple(wrong))
    if not 0 <= largest < store.vocab_size and entry.num_tokens:
        yield Fault(str(shard.bin_path), f"holds token {largest}, beyond the vocabulary of {store.vocab_size}")


def _source_fault(source: StoreSource, file: SourceFile) -> Fault | None:
    """Return what is wrong with a file that is streamed; of a damaged compressed one, all damaged frames."""
    place = source.place_of(file)
    try:
        source.checked(file, lambda source: deque(source.blocks(file), maxlen=0))
        return None
    except CheckFailed as error:
        message = error.message.removeprefix(place).lstrip(": ")
    damaged = _damaged_frames(source, file) if file.packed else []
    if len(damaged) > 1:
        numbers = ", ".join(map(str, damaged[:MAX_NAMED_FRAMES])) + ", ..." * (len(damaged) > MAX_NAMED_FRAMES)
        message = f"{len(damaged)} frames are damaged: {numbers}"
    return Fault(place, message)


def _damaged_frames(source: StoreSource, file: SourceFile) -> list[int]:
    """Return the damaged frames of a compressed file, none where even its table is damaged."""
    damaged = []
    try:
        reader = source.open_packed(file)
    except CheckFailed:
        return []
    for number, packed in reader.packed_frames():
        try:
            reader.unpack(number, packed)
        except CheckFailed:
            damaged.append(number)
    return damaged
