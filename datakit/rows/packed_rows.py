"""PackedRows: the rows of a packing index, of a store in a folder or behind a URL; Packing: which of them.

A PackingIndex says which pieces of which documents make each row: three mapped columns and a record of them. Opening
costs O(windows): the record and the files' sizes are checked, nothing else is read. The files are explained in
docs/formats/packing-index.md. A row that contradicts itself is a CheckFailed when it is read.

The index of a folder is mapped. That of a store behind a URL may be in a local folder or behind a URL: it is fetched
whole into the store's cache when that is opened, and checked: 12 bytes a piece and 8 a row. Rows of best fit hold
documents from all over a window of the index, so a cache has to hold some windows, or the same bytes are fetched again
and again: `datakit pack --window-documents` makes them smaller.
"""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np
import orjson
import xxhash

from datakit.files.durable import FileDigest
from datakit.format.fields import Fields
from datakit.format.manifest import digest_in, encoded_record, require_record
from datakit.format.native import copied
from datakit.format.shard import Int64s, map_file
from datakit.shards.cached_shards import CachedShards
from datakit.shards.holdings import Kind
from datakit.shards.shard_tokens import content_name
from datakit.shards.shards import Shards
from datakit.shards.store_source import read_small
from datakit.store.rows import Piece
from threefold.errors import CheckFailed, UserError, quoted
from threefold.storage import Storage
from threefold.storage.repeating import open_repeating
from threefold.storage.second_look import read_checked

RECORD_NAME = "packing.json"
COLUMNS = {"ends": "<i8", "starts": "<i8", "sizes": "<i4"}  # files by name, each with its type
FORMAT = "threefold-packing-index"
VERSION = 1
MAX_RECORD_BYTES = 64 << 20
PACKINGS = ("best_fit", "pad")
_READ_BYTES = 8 << 20


class _IndexFields(Fields):
    hint = "remove the folder, and make the index again with `datakit pack`"


@dataclass(frozen=True, slots=True)
class PackingRecord:
    """What an index is of, and what it holds: `packing.json`.

    `store` is the store's fingerprint and `documents` that of its documents' ends. Row r is of window w if as many rows
    come before it; `window_rows` counts the rows of each window of documents.
    """

    store: str
    documents: str
    packing: str
    seq_length: int
    window_documents: int
    num_documents: int
    num_tokens: int
    num_pieces: int
    window_rows: tuple[int, ...]
    files: dict[str, FileDigest]

    @property
    def num_rows(self) -> int:
        """Rows in all windows."""
        return sum(self.window_rows)

    @property
    def num_padding(self) -> int:
        """Places of the rows that no token takes."""
        return self.num_rows * self.seq_length - self.num_tokens

    @property
    def fingerprint(self) -> str:
        """XXH3-128 over the store's fingerprint and the files: equal rows of equal tokens, equal fingerprint."""
        return xxhash.xxh3_128_hexdigest(
            orjson.dumps([self.store, self.packing, self.seq_length, [self.files[name].xxh3_64 for name in COLUMNS]])
        )

    def encode(self) -> bytes:
        """Return the content of `packing.json`."""
        return encoded_record(FORMAT, VERSION, {"num_rows": self.num_rows, **asdict(self)})

    @classmethod
    def parse(cls, path: Path | str, data: bytes) -> "PackingRecord":
        """Check the content of the `packing.json` at a path."""
        fields = _IndexFields.parse(path, data)
        require_record(fields, FORMAT, VERSION, "the record of a packing index")
        files = fields.table("files")
        digests = {name: digest_in(files.table(name)) for name in COLUMNS}
        record = cls(
            fields.text("store"),
            fields.text("documents"),
            fields.text("packing"),
            fields.number("seq_length"),
            fields.number("window_documents"),
            fields.number("num_documents"),
            fields.number("num_tokens"),
            fields.number("num_pieces"),
            tuple(fields.values("window_rows")),
            digests,
        )
        if record.packing not in PACKINGS or min(record.seq_length, record.window_documents) < 1:
            raise fields.fault(f"packing {record.packing[:80]!r} into rows of {record.seq_length} tokens")
        if len(record.window_rows) != -(-record.num_documents // record.window_documents):
            raise fields.fault(f"{len(record.window_rows)} windows for {record.num_documents} documents")
        if any(type(count) is not int or count < 0 for count in record.window_rows):
            raise fields.fault("window_rows is not a list of numbers from 0")
        for name, dtype in COLUMNS.items():
            count = record.num_rows if name == "ends" else record.num_pieces
            if digests[name].size_bytes != count * np.dtype(dtype).itemsize:
                raise fields.fault(f"{digests[name].size_bytes} bytes of {name} for {count} of them")
        return record


class PackingIndex:
    """An open index of one store; safe to read from several threads."""

    def __init__(self, folder: Path | str, record: PackingRecord, map_column: Callable[[str], memoryview]) -> None:
        """Map the columns of a record that was read from `folder`, by their names; only their sizes are checked."""
        self.folder, self.record = folder, record
        columns = {}
        for name, dtype in COLUMNS.items():
            data, size_bytes = map_column(name), record.files[name].size_bytes
            if len(data) != size_bytes:
                raise self.damaged(f"{column_file(name)} has {len(data)} bytes, its record says {size_bytes}")
            columns[name] = np.frombuffer(data, dtype)
        self._ends, self._starts, self._sizes = (columns[name] for name in COLUMNS)
        self._window_starts = [0, *accumulate(record.window_rows)]

    @classmethod
    def open(cls, folder: Path, store: Shards, *, packing: str, seq_length: int) -> "PackingIndex":
        """Open the index of a store; UserError if there is none, or it is of other tokens, or packed otherwise."""
        return cls(
            folder,
            checked(read_record(folder), folder, store, packing=packing, seq_length=seq_length),
            lambda name: map_file(column_path(folder, name)),
        )

    def row(self, number: int) -> list[Piece]:
        """Return the pieces of a row in the order of their tokens; CheckFailed if they do not make one."""
        first, stop = [0, *copied(self._ends[max(number - 1, 0) : number + 1]).tolist()][-2:]
        starts: list[int] = copied(self._starts[max(first, 0) : stop]).tolist()
        sizes: list[int] = copied(self._sizes[max(first, 0) : stop]).tolist()
        pieces = [Piece(start, abs(size), size < 0) for start, size in zip(starts, sizes)]
        used = sum(piece.size for piece in pieces)
        if not 0 <= first < stop <= len(self._sizes) or not 0 < used <= self.record.seq_length or not all(sizes):
            raise self.damaged(f"row {number} has {used} tokens in {stop - first} pieces")
        return pieces

    def rows_of(self, document: int, begin: int, stop: int) -> Int64s:
        """Return the rows with pieces of a document, which is tokens [begin, stop) of the store, in their order."""
        window = document // self.record.window_documents
        rows = slice(*self._window_starts[window : window + 2])
        first = int(self._ends[rows.start - 1]) if rows.start else 0
        last = int(self._ends[rows.stop - 1]) if rows.stop else 0
        starts = self._starts[first:last]
        pieces = first + np.flatnonzero((starts >= begin) & (starts < stop))
        found: Int64s = rows.start + np.searchsorted(self._ends[rows], pieces, side="right").astype(np.int64)
        return found

    def damaged(self, what: str) -> CheckFailed:
        """Return the error of an index that is not as it was written."""
        return CheckFailed(f"{self.folder} is damaged: {what}", hint=f"datakit verify {quoted(self.folder)}")


def checked(
    record: PackingRecord | None, folder: Path | str, store: Shards, *, packing: str, seq_length: int
) -> PackingRecord:
    """Return the record of a folder if it is of these rows of the store; UserError otherwise, or without a record."""
    if packing not in PACKINGS:
        raise UserError(f"{packing!r} is not a packing", hint=" or ".join(PACKINGS))
    again = f"datakit pack {quoted(store.place)} --seq-length {seq_length} --packing {packing}"
    if record is None:
        raise UserError(
            f"{store.place} is not packed by {packing} into rows of {seq_length} tokens: {folder} is not there",
            hint=again,
        )
    manifest = store.manifest
    if (record.store, record.documents) != (manifest.fingerprint, manifest.documents_fingerprint):
        raise UserError(
            f"{folder} is the index of another store, of fingerprint {record.store}: {store.place} has "
            f"{manifest.fingerprint}",
            hint=f"{again} --output FOLDER",
        )
    if (record.packing, record.seq_length) != (packing, seq_length):
        raise UserError(
            f"{folder} is packed by {record.packing} into rows of {record.seq_length} tokens, not by {packing} into "
            f"rows of {seq_length}",
            hint=f"{again} --output FOLDER",
        )
    return record


def column_file(name: str) -> str:
    """Return the name of a column's file."""
    return f"{name}.bin"


def column_path(folder: Path, name: str) -> Path:
    """Return the file of a column."""
    return folder / column_file(name)


def default_name(packing: str, seq_length: int) -> str:
    """Return the name of an index in its store."""
    return f"packing-{packing}-{seq_length}"


def read_record(place: Path | str) -> PackingRecord | None:
    """Return the record of the index in a folder or at a URL, None if there is none."""
    storage = open_repeating(place)
    return read_checked(storage, f"{storage.url}/{RECORD_NAME}", _read_record)


def _read_record(storage: Storage) -> PackingRecord | None:
    content = read_small(storage, RECORD_NAME, MAX_RECORD_BYTES)
    return None if content is None else PackingRecord.parse(f"{storage.url}/{RECORD_NAME}", content)


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
