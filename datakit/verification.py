"""Verify: every file of a store against its manifest, and where damage is found, the documents it lies in.

A clean store costs one sequential read of its files, and memory of one block. The documents of a damaged file are told
apart by arithmetic (`.idx`) and by the checks that the `.origin` file keeps for each document (`.bin`, `.origin`).
An archive, or a store at a URL, is streamed from where it lies; there the damaged frames are told, not the documents.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from datakit.manifest import Manifest, ShardEntry
from datakit.shard import FileDigest, ShardIndex, digest_file
from datakit.store import TokenStore
from datakit.store_source import SourceFile, StoreSource, is_plain_folder
from threefold.errors import CheckFailed, StorageError

MAX_NAMED_DOCUMENTS = MAX_NAMED_FRAMES = 10
_CHECKED_TOKENS = 4 << 20


@dataclass(frozen=True, slots=True)
class Fault:
    """Something wrong with one file: what, and the store's documents that it touches, as far as they can be told."""

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
    """All faults of a store or archive, in a folder or at a URL, none for a sound one; CheckFailed where its manifest
    is damaged."""
    if not is_plain_folder(os.fspath(path)):
        source = StoreSource.open(os.fspath(path))
        return [fault for file in source.files if (fault := _source_fault(source, file))]
    folder = Path(path)
    store = TokenStore(folder, Manifest.read(folder))
    return [
        fault for number, entry in enumerate(store.manifest.shards) for fault in _shard_faults(store, number, entry)
    ]


def _shard_faults(store: TokenStore, number: int, entry: ShardEntry) -> Iterator[Fault]:
    damaged: dict[str, Fault] = {}
    for file, digest in store.files(entry):
        message = _file_fault(file, digest)
        if message:
            damaged[file.suffix] = Fault(str(file), message)
    first = int(store.document_starts[number])
    for suffix, fault in damaged.items():
        documents = _damaged_documents(store, number, entry, suffix)
        yield Fault(fault.file, fault.message, tuple(first + document for document in documents))
    if not damaged:
        yield from _content_faults(store, number, entry)


def _file_fault(file: Path, digest: FileDigest) -> str | None:
    """What is wrong with the bytes of a file, None if nothing."""
    try:
        size_bytes = file.stat().st_size
        if size_bytes != digest.size_bytes:
            return f"has {size_bytes} bytes, its manifest says {digest.size_bytes}"
        return None if digest_file(file) == digest else "is damaged: its checksum does not hold"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        raise StorageError(f"cannot read {file}: {error.strerror}") from error


def _damaged_documents(store: TokenStore, number: int, entry: ShardEntry, suffix: str) -> list[int]:
    """The documents of a shard that lie in damaged bytes of one of its files; none where that cannot be told."""
    try:
        if suffix == ".idx":
            return _damaged_in_index(ShardIndex(store.path / f"{entry.name}.idx"), entry)
        shard, origins = store.shard(number), store.origins(number)
        return [
            document
            for document in range(entry.num_documents)
            if not origins.holds(document, shard.document(document).tobytes())
        ]
    except (CheckFailed, StorageError):  # the other files cannot be opened either: the fault itself is told
        return []


def _damaged_in_index(index: ShardIndex, entry: ShardEntry) -> list[int]:
    """The documents whose entries disagree with the rest of an index."""
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
    return [int(document) for document in np.flatnonzero(wrong)]


def _content_faults(store: TokenStore, number: int, entry: ShardEntry) -> Iterator[Fault]:
    """Whether files with sound checksums also fit each other and the vocabulary."""
    try:
        shard, origins = store.shard(number), store.origins(number)
    except CheckFailed as error:
        yield Fault(str(store.path / entry.name), error.message)
        return
    if wrong := _damaged_in_index(shard.index, entry):
        yield Fault(str(shard.idx_path), "contradicts itself", tuple(wrong))
    if origins.num_documents != entry.num_documents:
        yield Fault(
            str(origins.path), f"has {origins.num_documents} documents, its manifest says {entry.num_documents}"
        )
    with shard.bin_path.open("rb") as stream:  # read, not mapped: memory stays one block
        while len(tokens := np.fromfile(stream, shard.dtype, _CHECKED_TOKENS)):
            for token in (int(tokens.min()), int(tokens.max())):
                if not 0 <= token < store.vocab_size:
                    yield Fault(
                        str(shard.bin_path), f"holds token {token}, beyond the vocabulary of {store.vocab_size}"
                    )
                    return


def _source_fault(source: StoreSource, file: SourceFile) -> Fault | None:
    """What is wrong with a file that is streamed; of a damaged compressed one, all damaged frames."""
    place = source.place_of(file)
    try:
        for _ in source.blocks(file):
            pass
        return None
    except CheckFailed as error:
        message = error.message.removeprefix(place).lstrip(": ")
    damaged = _damaged_frames(source, file) if file.packed else []
    if len(damaged) > 1:
        numbers = ", ".join(map(str, damaged[:MAX_NAMED_FRAMES])) + ", ..." * (len(damaged) > MAX_NAMED_FRAMES)
        message = f"{len(damaged)} frames are damaged: {numbers}"
    return Fault(place, message)


def _damaged_frames(source: StoreSource, file: SourceFile) -> list[int]:
    """The damaged frames of a compressed file, none where even its table is damaged."""
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
