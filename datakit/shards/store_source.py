"""StoreSource: the bytes of a token store or an archive, in a folder or at a URL, read as streams and checked.

Memory is a few blocks a file being read, whatever its size. A request that the server did not answer is repeated. What
fails its checksum is read once more on a new connection, if it comes over a network.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import xxhash

from datakit.files.durable import FileDigest
from datakit.format.archive_record import MAX_RECORD_BYTES, PLAN_KEY, SUFFIX, ArchiveRecord
from datakit.format.manifest import ARCHIVE_NAME, FILE_NAME, MAX_BYTES, Manifest
from datakit.format.seekable_zstd import DAMAGE_HINT, READ_BYTES, SeekableReader
from datakit.format.tokenizer_copy import open_copy
from datakit.tokenization.tokenizer import MAX_FILE_BYTES, Tokenizer
from threefold.errors import CheckFailed, StorageError, UserError, quoted
from threefold.storage import Buffer, Storage, TemporaryFailure
from threefold.storage.repeating import open_repeating
from threefold.storage.second_look import read_checked, say_right

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a store: its name and the digest of its bytes; in an archive also that of the compressed file."""

    name: str
    digest: FileDigest
    packed: FileDigest | None


class StoreSource:
    """A store or archive that is read from where it is; safe to read from several threads.

    `record` is None for a store that is not compressed.
    """

    def __init__(self, storage: Storage, manifest_bytes: bytes, record: ArchiveRecord | None) -> None:
        """Wrap what was read already; `StoreSource.open` is the usual way."""
        self.storage, self.manifest_bytes, self.record = storage, manifest_bytes, record
        self.manifest = Manifest.parse(f"{storage.url}/{FILE_NAME}", manifest_bytes)
        digests = self.manifest.files()
        if len(digests) != 3 * len(self.manifest.shards):
            raise _fault(f"{storage.url}/{FILE_NAME} names a shard twice")
        if record and list(record.files) != [f"{name}{SUFFIX}" for name in digests]:
            raise _fault(f"{storage.url}/{ARCHIVE_NAME} does not name the files of its store")
        self.files = [
            SourceFile(name, digest, record.files[f"{name}{SUFFIX}"] if record else None)
            for name, digest in digests.items()
        ]

    @classmethod
    def open(cls, place: str) -> "StoreSource":
        """Read and check the records of a store or an archive; UserError if there is neither."""
        storage = open_repeating(place)
        return read_checked(storage, storage.url, cls._opened)

    def checked(self, file: SourceFile, read: Callable[["StoreSource"], T]) -> T:
        """Return what `read` returns of a file; behind a network a CheckFailed of it counts at the second look."""
        return read_checked(self.storage, self.place_of(file), lambda storage: read(self._at(storage)))

    def _at(self, storage: Storage) -> "StoreSource":
        """Return the same source, read from the same storage on another connection."""
        source = copy.copy(self)
        source.storage = storage
        return source

    @classmethod
    def _opened(cls, storage: Storage) -> "StoreSource":
        record_bytes = read_small(storage, ARCHIVE_NAME, MAX_RECORD_BYTES)
        record = None if record_bytes is None else ArchiveRecord.parse(f"{storage.url}/{ARCHIVE_NAME}", record_bytes)
        if record is None and storage.info(PLAN_KEY):
            raise UserError(
                f"{storage.url} is unfinished: the command that makes it did not come to an end",
                hint="rerun the same `datakit archive` command to continue it",
            )
        manifest_bytes = read_small(storage, FILE_NAME, MAX_BYTES)
        if manifest_bytes is None:
            raise _fault(f"{storage.url}/{FILE_NAME} is missing") if record else _nothing_there(storage)
        if record and record.manifest != FileDigest.of(manifest_bytes):
            raise _fault(f"{storage.url}/{FILE_NAME} is damaged: its checksum does not hold")
        return cls(storage, manifest_bytes, record)

    def place_of(self, file: SourceFile) -> str:
        """Return the path or URL of a file, for messages."""
        return f"{self.storage.url}/{_key(file)}"

    def blocks(self, file: SourceFile) -> Iterator[bytes]:
        """Yield the bytes of a file that has the recorded size, a few MiB at a time.

        Once they are all given, CheckFailed if a checksum fails.
        """
        self.check_size(file)
        yield from self._checked_blocks(file)

    def content(self, file: SourceFile) -> bytes:
        """Return the bytes of a file, checked; it is not looked up before, so what may follow them is not seen."""
        return b"".join(self._checked_blocks(file))

    def _checked_blocks(self, file: SourceFile) -> Iterator[bytes]:
        hasher = xxhash.xxh3_64()
        for block in self._packed_blocks(file) if file.packed else self._plain_blocks(file):
            hasher.update(block)
            yield block
        if hasher.hexdigest() != file.digest.xxh3_64:
            raise _fault(f"{self.place_of(file)} is damaged: its content's checksum does not hold")

    def open_packed(self, file: SourceFile) -> SeekableReader:
        """Random access to the content of a compressed file; CheckFailed if it is not of the recorded sizes.

        What may follow it is not seen.
        """
        assert file.packed, f"{file.name} is not compressed"
        reader = SeekableReader(self.place_of(file), file.packed.size_bytes, partial(self._read, file))
        if reader.size_bytes != file.digest.size_bytes:
            raise _fault(f"{reader.name} holds {reader.size_bytes} bytes, its manifest says {file.digest.size_bytes}")
        return reader

    def open_tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer that made the store, by the store's own copy; None if it keeps none."""
        return open_copy(self.storage.url, self.manifest.tokenizer_files, self.read_small)

    def copied(self, name: str, digest: FileDigest) -> bytes:
        """Return a file of the store's copy of its tokenizer, CheckFailed if it is missing or damaged."""
        place = f"{self.storage.url}/{name}"

        def read(storage: Storage) -> bytes:
            content = read_small(storage, name, MAX_FILE_BYTES)
            if content is None:
                raise _fault(f"{place} is missing")
            if FileDigest.of(content) != digest:
                raise _fault(f"{place} is damaged: its checksum does not hold")
            return content

        return read_checked(self.storage, place, read)

    def read_small(self, name: str) -> bytes | None:
        """Return a small file beside the manifest, None if it is missing."""
        return read_small(self.storage, name, MAX_FILE_BYTES)

    def check_size(self, file: SourceFile) -> None:
        """Look a file up; CheckFailed if it is missing or not of the recorded size."""
        info, expected = self.storage.info(_key(file)), file.packed or file.digest
        if info is None:
            raise _fault(f"{self.place_of(file)} is missing")
        if info.size_bytes != expected.size_bytes:
            record = ARCHIVE_NAME if file.packed else FILE_NAME
            raise _fault(f"{self.place_of(file)} has {info.size_bytes} bytes, {record} says {expected.size_bytes}")

    def read_plain(self, file: SourceFile, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop) of a file that is not compressed, as they come: who reads them must check."""
        assert not file.packed, f"{file.name} is compressed"
        return memoryview(self._read(file, start, stop))

    def _read(self, file: SourceFile, start: int, stop: int) -> Buffer:
        """Return bytes of a file as it is stored; if they are not there CheckFailed says what is wrong with it."""
        try:
            [part] = self.storage.read_ranges(_key(file), [(start, stop)])
            return part
        except TemporaryFailure:
            raise
        except StorageError:
            self.check_size(file)
            raise

    def _packed_blocks(self, file: SourceFile) -> Iterator[bytes]:
        assert file.packed
        reader, hasher = self.open_packed(file), xxhash.xxh3_64()
        for number, packed in reader.packed_frames():
            try:
                content = reader.unpack(number, packed)
            except CheckFailed:
                storage = self.storage.afresh()
                if storage is None:
                    raise
                packed, content = self._at(storage)._frame(file, number)
                say_right(f"{self.place_of(file)}, frame {number},")
            hasher.update(packed)
            yield content
        hasher.update(reader.table)
        if hasher.hexdigest() != file.packed.xxh3_64:
            raise _fault(f"{reader.name} is damaged: its checksum does not hold")

    def _frame(self, file: SourceFile, number: int) -> tuple[memoryview, bytes]:
        """Return a frame of a compressed file, and its content."""
        reader = self.open_packed(file)
        [(_, packed)] = reader.packed_frames(number, number + 1)
        return packed, reader.unpack(number, packed)

    def _plain_blocks(self, file: SourceFile) -> Iterator[bytes]:
        size_bytes = file.digest.size_bytes
        for start in range(0, size_bytes, READ_BYTES):
            yield bytes(self._read(file, start, min(start + READ_BYTES, size_bytes)))


def is_store(url: str) -> bool:
    """Return whether there is a store or an archive at a URL; StorageError if nobody answers."""
    return open_repeating(url).info(FILE_NAME) is not None


def store_tokenizer(place: str) -> Tokenizer | None:
    """Return the tokenizer that a store or an archive keeps a copy of, in a folder or at a URL; None if none."""
    return StoreSource.open(place).open_tokenizer()


def read_small(storage: Storage, key: str, max_bytes: int) -> bytes | None:
    """Return a whole record, None if it is missing."""
    info = storage.info(key)
    if info is None:
        return None
    if info.size_bytes > max_bytes:
        raise _fault(f"{storage.url}/{key} has {info.size_bytes} bytes, more than the {max_bytes} it may have")
    return bytes(storage.read_ranges(key, [(0, info.size_bytes)])[0])


def _fault(message: str) -> CheckFailed:
    return CheckFailed(message, hint=DAMAGE_HINT)


def _nothing_there(storage: Storage) -> UserError:
    parts = [name for name in ("train", "valid") if storage.info(f"{name}/{FILE_NAME}")]
    if parts:
        return UserError(f"{storage.url} is split; name one of its stores", hint=quoted(f"{storage.url}/{parts[0]}"))
    if storage.info("root.json") or any(name.startswith("step-0") for name in storage.list_folders()):
        return UserError(
            f"{storage.url} is not a token store or archive but one of checkpoints",
            hint=f"ckptkit inspect {quoted(storage.url)}",
        )
    return UserError(
        f"{storage.url} is not a token store or archive: it has no {FILE_NAME}",
        hint=f"name the place that holds the {FILE_NAME}",
    )


def _key(file: SourceFile) -> str:
    return f"{file.name}{SUFFIX}" if file.packed else file.name
