"""Origins: where each document of a shard came from, kept as columns in one `.origin` file beside the shard.

20 bytes a document: the byte offset in its source file (of the uncompressed text), the file's number, the line within
the work item, and a check of the document's tokens together with its origin, which shows which are damaged. The
layout is in docs/formats/token-store.md.
"""

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import orjson
import xxhash

from datakit.format.native import check_read, library
from datakit.format.shard import damaged, map_file
from threefold.masking import masked
from threefold.storage import Buffer

MAGIC = b"TFORIGIN"
VERSION = 1
HEADER = struct.Struct("<8sIIQQ")  # magic, version, 0, documents, bytes of the table of sources
_ROW = struct.Struct("<QII")
Checks = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a document came from: file, byte offset in its (uncompressed) content, line from 1.

    In parquet and Arrow files the line is the row, and the offset is 0.
    """

    path: str
    offset_bytes: int
    line: int


class Origins:
    """The origins of one shard's documents, memory-mapped."""

    def __init__(self, path: Path, first_line: int = 0, data: memoryview | None = None) -> None:
        """Open an `.origin` file, or take `data` that was mapped of it.

        `first_line` is how many lines of the source precede the work item.
        """
        self.path, self.first_line = path, first_line
        data = map_file(path) if data is None else data
        if len(data) < HEADER.size:
            raise damaged(f"{path} has {len(data)} bytes, too few for origins")
        magic, version, _, num_documents, table_bytes = HEADER.unpack_from(data)
        if magic != MAGIC or version != VERSION:
            raise damaged(f"{path} begins with {magic!r} version {version}, {MAGIC!r} version {VERSION} expected")
        expected = HEADER.size + table_bytes + 20 * num_documents
        if len(data) != expected or table_bytes % 8:
            raise damaged(f"{path} has {len(data)} bytes, {expected} expected for {num_documents} documents")
        self.num_documents: int = num_documents
        self._table = data[HEADER.size : HEADER.size + table_bytes]
        at = HEADER.size + table_bytes
        self.offsets = np.frombuffer(data, "<u8", num_documents, at)
        self.source_numbers = np.frombuffer(data, "<u4", num_documents, at + 8 * num_documents)
        self.lines = np.frombuffer(data, "<u4", num_documents, at + 12 * num_documents)
        self.checks = np.frombuffer(data, "<u4", num_documents, at + 16 * num_documents)

    @cached_property
    def sources(self) -> list[str]:
        """The source files, by number; the table is read once, in memory of twice its size."""
        try:
            table = orjson.loads(self._table)
        except orjson.JSONDecodeError as error:
            raise damaged(f"{self.path}: the table of sources is damaged: {error}") from error
        if not isinstance(table, list) or not all(isinstance(path, str) for path in table):
            raise damaged(f"{self.path}: the table of sources is not a list of paths")
        return table

    def __getitem__(self, number: int) -> Origin:
        if not 0 <= number < self.num_documents:
            raise IndexError(f"document {number} of {self.num_documents} in {self.path}")
        sources, source = self.sources, int(self.source_numbers[number])
        if source >= len(sources):
            raise damaged(f"{self.path}: document {number} names source {source} of {len(sources)}")
        return Origin(sources[source], int(self.offsets[number]), self.first_line + int(self.lines[number]) + 1)

    def of(self, numbers: npt.NDArray[np.int64]) -> list[Origin]:
        """Return the origins of some documents, one at least, in a fraction of the time that they take one by one."""
        columns = self.source_numbers[numbers], self.offsets[numbers], self.lines[numbers]
        _ = self[int(numbers[columns[0].argmax()])]  # if any names a source that is not there, this one does
        sources, first = self.sources, self.first_line + 1
        rows = zip(*(column.tolist() for column in columns))
        return [Origin(sources[source], offset, first + line) for source, offset, line in rows]

    def holds(self, number: int, tokens: bytes) -> bool:
        """Return whether a document's tokens and origin are those that were written."""
        row = int(self.offsets[number]), int(self.source_numbers[number]), int(self.lines[number])
        return int(self.checks[number]) == document_check(tokens, *row)

    def first_damaged(self, first: int, tokens: Buffer, sizes: Sequence[int]) -> int | None:
        """Return the first document, of those from `first` on with these bytes, that is not as it was written."""
        part = slice(first, first + len(sizes))
        columns = self.offsets[part], self.source_numbers[part], self.lines[part]
        wrong = np.flatnonzero(self.checks[part] != _document_checks(tokens, sizes, *columns))
        return first + int(wrong[0]) if len(wrong) else None


class OriginsWriter:
    """Collects the origins of one shard; memory is 20 bytes a document and the paths of its sources."""

    def __init__(self) -> None:
        self._offsets, self._sources, self._lines, self._checks = array("Q"), array("I"), array("I"), array("I")
        self._paths: dict[str, int] = {}

    def extend(
        self, path: str, offsets: Sequence[int], lines: Sequence[int], tokens: bytes, sizes: Sequence[int]
    ) -> None:
        """Append documents of one source: a column of each, the bytes of all their tokens, and how many each has.

        Lines count from 0 within the work item.
        """
        source = self._paths.setdefault(masked(path), len(self._paths))
        self._offsets.extend(offsets)
        self._sources.extend([source] * len(offsets))
        self._lines.extend(lines)
        self._checks.extend(_document_checks(tokens, sizes, offsets, source, lines).tolist())

    def encode(self) -> bytes:
        """Return the content of the `.origin` file."""
        columns = [
            np.frombuffer(column, column.typecode).astype(kind).tobytes()
            for column, kind in (
                (self._offsets, "<u8"), (self._sources, "<u4"), (self._lines, "<u4"), (self._checks, "<u4"),
            )
        ]  # fmt: skip
        return b"".join([origins_head(len(self._offsets), list(self._paths)), *columns])


def origins_head(num_documents: int, sources: list[str]) -> bytes:
    """Return the beginning of an `.origin` file: its header and the table of sources."""
    table = orjson.dumps(sources)
    table += b" " * (-len(table) % 8)
    return HEADER.pack(MAGIC, VERSION, 0, num_documents, len(table)) + table


def document_check(tokens: bytes, offset_bytes: int, source: int, line: int) -> int:
    """Return the low 32 bits of XXH3-64 over a document's origin (offset u64, source u32, line u32) and its tokens."""
    return xxhash.xxh3_64_intdigest(_ROW.pack(offset_bytes, source, line) + tokens) & 0xFFFFFFFF


def _document_checks(
    tokens: Buffer, sizes: Sequence[int], offsets: npt.ArrayLike, source: npt.ArrayLike, lines: npt.ArrayLike
) -> Checks:
    """Return the checks of documents, of one source or each of its own, made without the GIL."""
    content, counts = np.frombuffer(tokens, np.uint8), np.array(sizes, np.int64)
    assert counts.sum() == len(content), "documents' sizes sum to the bytes of their tokens"
    columns = [
        np.ascontiguousarray(np.broadcast_to(np.asarray(column, kind), counts.shape))
        for column, kind in ((offsets, np.uint64), (source, np.uint32), (lines, np.uint32))
    ]
    checks = np.empty(len(counts), np.uint32)
    addresses = (array.ctypes.data for array in (*columns, checks))
    code = library().dk_check_documents(content.ctypes.data, counts.ctypes.data, len(counts), *addresses)
    check_read(code, f"checks of {len(counts)} documents")
    return checks
