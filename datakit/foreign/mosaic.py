"""Mosaic: MDS shards of MosaicML's streaming into a store; one column of them holds the tokens.

A shard is u32 samples, u32 offsets of the samples and of the end, its configuration as JSON, then the samples: the u32
sizes of the columns that have no fixed one, and the columns. It may be compressed as a whole, and is then unpacked
while it is read, front to back. Memory is one sample and 4 bytes for each of a shard. Pickled columns are passed over.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from datakit.foreign.exact_reader import COMPRESSIONS, ExactReader, damaged, open_exactly
from datakit.foreign.foreign_index import ForeignIndex, choose_column, index_of, read_column, require_dtype, tokens_in
from datakit.foreign.foreign_store import TOKEN_DTYPES, Choices, store_of_files
from datakit.format.shard import Int64s, Tokens
from datakit.store.token_store import TokenStore
from threefold.errors import UserError, quoted

_ANEW = "write the tokens as a column ndarray:int32 with streaming's MDSWriter, or begin with text: datakit preprocess"
_DTYPES = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 32: "uint32", 33: "int32", 64: "uint64", 65: "int64",
}  # fmt: skip


def from_mds(sources: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str], choices: Choices) -> TokenStore:
    """Make a store of the shards of folders with an index.json of version 2.

    UserError if no column, or more than one, may hold tokens and `choices.column` names none, where it is of raw
    bytes and `choices.dtype` is not given, or where it is pickled.
    """
    files = [file for source in sources for file in _mds_files(source, choices)]
    return store_of_files("mds", files, [*map(index_of, sources), *(file.path for file in files)], output, choices)


def _mds_files(source: str | os.PathLike[str], choices: Choices) -> "list[_MdsFile]":
    index = ForeignIndex.read(index_of(source))
    if index.number("version") != 2:
        raise UserError(f"{index.path} has version {index.raw['version']}, this program reads version 2", hint=_ANEW)
    return [_MdsFile.open(shard, os.fspath(Path(source)), choices) for shard in index.parts("shards")]


@dataclass(frozen=True, slots=True)
class _TokenColumn:
    """The column of tokens; `dtype` and `shape` are None if each sample says its own."""

    name: str
    number: int
    dtype: str | None
    shape: tuple[int, ...] | None
    is_raw: bool


@dataclass(frozen=True, slots=True)
class _MdsFile:
    """One shard as the index describes it."""

    path: Path
    stream: str
    compression: str
    hashes: dict[str, str]
    size_bytes: int  # of the uncompressed shard
    num_samples: int
    fixed_sizes: tuple[int | None, ...]  # of the columns, in bytes
    column: _TokenColumn

    has_borders = True

    @classmethod
    def open(cls, shard: ForeignIndex, stream: str, choices: Choices) -> "_MdsFile":
        if shard.number("version") != 2 or shard.text("format") != "mds":
            kind = f"version {shard.raw['version']}, format {shard.raw.get('format')!r:.80}"
            raise UserError(
                f"{shard.path}: {shard.place.rstrip('.')} is of {kind}; version 2, 'mds' is read", hint=_ANEW
            )
        names, encodings = shard.texts("column_names"), shard.texts("column_encodings")
        sizes = shard.values("column_sizes")
        if not len(names) == len(encodings) == len(sizes) or not all(
            size is None or (isinstance(size, int) and 0 < size < 1 << 32) for size in sizes
        ):
            raise damaged(f"{shard.path}: {shard.place}column_sizes do not fit the columns {names}")
        raw = shard.table("raw_data")
        packed = shard.table("zip_data") if shard.raw.get("zip_data") else None
        # what was unpacked once (and perhaps kept) is beside the index under its raw name
        compression = (shard.raw.get("compression") or "") if packed and not raw.file("basename").is_file() else ""
        kind = compression.partition(":")[0] if isinstance(compression, str) else compression
        if kind not in COMPRESSIONS:
            raise UserError(
                f"{shard.path}: {shard.place}compression is {compression!r}; zstd and gz are read",
                hint="write the shards again with streaming's MDSWriter(compression='zstd')",
            )
        file = cls(
            (packed if packed and kind else raw).file("basename"),
            stream,
            kind,
            {
                name: value
                for name, value in (raw.table("hashes").raw if raw.raw.get("hashes") else {}).items()
                if isinstance(value, str)
            },
            raw.number("bytes"),
            shard.number("samples"),
            tuple(sizes),
            _choose_column(shard, names, encodings, choices),
        )
        if not file.path.is_file():
            raise UserError(
                f"{shard.path} names {file.path.name}, which is missing", hint=f"ls -l {quoted(file.path.parent)}"
            )
        size_bytes = file.path.stat().st_size
        if not kind and size_bytes != file.size_bytes:
            raise damaged(f"{file.path} has {size_bytes} bytes, its index says {file.size_bytes}")
        return file

    def samples(self) -> Iterator[tuple[Tokens, int]]:
        with open_exactly(self.path, self.compression, self.hashes) as reader:
            offsets = self._offsets(reader)
            reader.skip(int(offsets[0]) - reader.at)
            for number, end in enumerate(offsets[1:].tolist()):
                yield self._tokens(reader, number, end - reader.at)
            reader.finish()

    def _offsets(self, reader: ExactReader) -> Int64s:
        """Where samples begin and end, checked to follow each other up to the end of the shard."""
        num_samples = int.from_bytes(reader.read(4), "little")
        if num_samples != self.num_samples or 8 + 4 * num_samples > self.size_bytes:
            raise damaged(
                f"{self.path} says {num_samples} samples, its index {self.num_samples} in {self.size_bytes} bytes"
            )
        offsets = reader.offsets(num_samples + 1)
        if offsets[0] < reader.at or offsets[-1] != self.size_bytes or (np.diff(offsets) < 0).any():
            raise damaged(f"{self.path}: its samples do not follow each other up to byte {self.size_bytes}")
        return offsets

    def _tokens(self, reader: ExactReader, number: int, size_bytes: int) -> tuple[Tokens, int]:
        sample = f"{self.path}: sample {number}"
        at, data = read_column(reader, size_bytes, self.fixed_sizes, self.column.number, sample, "columns")
        tokens = self._decode(sample, data)
        return tokens, at + len(data) - tokens.nbytes

    def _decode(self, sample: str, data: bytes) -> Tokens:
        """Return the array in a column's bytes: its dtype and shape first where they are not fixed, then its values."""
        head, column = 0, self.column
        dtype, shape = column.dtype, column.shape
        try:
            if dtype is None:
                dtype, head = _DTYPES[data[0]], 1
            if shape is None and not column.is_raw:
                num_dims, width = data[head] >> 2, 1 << (data[head] & 3)
                values = np.frombuffer(data, f"<u{width}", num_dims, head + 1)
                shape, head = tuple(values.tolist()), head + 1 + num_dims * width
        except (KeyError, IndexError, ValueError):
            raise damaged(f"{sample} has no array of integers in column {column.name!r}") from None
        return tokens_in(data, head, str(dtype), shape, sample, _ANEW, f" in {column.name!r}")


def _choose_column(shard: ForeignIndex, names: list[str], encodings: list[str], choices: Choices) -> _TokenColumn:
    """Return the column named by `choices`, else the only one that may hold tokens."""
    place = f"{shard.path}: {shard.place.rstrip('.')}"
    columns = list(zip(names, encodings))
    number = choose_column(place, "column", columns, _fits, choices, kinds="ndarray or bytes", how=_ANEW)
    name, encoding = columns[number]
    is_raw, (_, dtype, shape) = encoding == "bytes", f"{encoding}::".split(":")[:3]
    require_dtype(f"{place}: column {name!r}", dtype or encoding, choices, is_raw=is_raw)
    dims = tuple(int(dim) for dim in shape.split(",")) if shape else None
    return _TokenColumn(name, number, choices.dtype if is_raw else dtype or None, dims, is_raw)


def _fits(encoding: str) -> bool:
    """Return whether a column may hold tokens: raw bytes, or arrays of integers of one or more dimensions."""
    kind, _, rest = encoding.partition(":")
    dtype, _, shape = rest.partition(":")
    sound = dtype in ("", *TOKEN_DTYPES) and all(dim.isdecimal() and len(dim) < 10 for dim in shape.split(",") if shape)
    return encoding == "bytes" or (kind == "ndarray" and sound)
