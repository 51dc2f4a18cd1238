"""Litdata: optimized chunks into a store; one leaf of their items holds the tokens.

A chunk is u32 items, u32 offsets of the items and of the end, then the items: of a TokensLoader the tokens alone, else
the u32 sizes of the leaves and the leaves. zstd packs whole chunks, batches of items (a directory before them) or
single items. Memory is one item (or packed batch) and 4 bytes for each of a chunk. Pickled and encrypted items are
refused.
"""

import os
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from datakit.foreign.exact_reader import ExactReader, damaged, open_exactly
from datakit.foreign.foreign_index import ForeignIndex, choose_column, index_of, read_column, require_dtype, tokens_in
from datakit.foreign.foreign_store import TOKEN_DTYPES, Choices, store_of_files
from datakit.format.shard import Int64s, Tokens
from datakit.store.token_store import TokenStore
from threefold.errors import UserError, quoted

_TENSOR_DTYPES = {11: "uint8", 12: "int8", 13: "int16", 14: "int16", 15: "int32", 16: "int32", 17: "int64",
                  18: "int64", 20: "uint16"}  # fmt: skip
_NUMPY_DTYPES = dict(enumerate(("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")))
_DTYPES = {"no_header_tensor": _TENSOR_DTYPES, "no_header_numpy": _NUMPY_DTYPES}
_HEADED = {"tensor": (">", _TENSOR_DTYPES), "numpy": ("<", _NUMPY_DTYPES)}  # byte order of dtype, dimensions, shape
_FRAMED_MAGIC = b"LDFZ01\0\0"
_FRAMED_HEAD = struct.Struct("<8sHHIII")  # magic, version, flags, items, items a frame, frames
_FRAME = struct.Struct("<IIQII")  # first item, items, offset and size of the frame, size of its content
_HOW = "optimize the tokens as 1-D tensors or arrays with litdata, or begin with text: datakit preprocess"


def from_litdata(
    sources: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str], choices: Choices
) -> TokenStore:
    """Make a store of the chunks of folders with an index.json.

    UserError if no leaf, or more than one, may hold tokens and `choices.column` names none, where it is of raw bytes
    and `choices.dtype` is not given, and for pickled, encrypted, parquet or Arrow items.
    """
    indices = [ForeignIndex.read(index_of(source)) for source in sources]
    files = [file for index in indices for file in _chunks(index, choices)]
    return store_of_files(
        "litdata", files, [*(index.path for index in indices), *(file.path for file in files)], output, choices
    )


@dataclass(frozen=True, slots=True)
class _Leaf:
    """The leaf of an item that holds its tokens; a `form` with a header has the dtype itself."""

    number: int
    form: str
    dtype: str | None


@dataclass(frozen=True, slots=True)
class _Layout:
    """How all chunks of a dataset are laid out; `packing` is what zstd packs: "", "chunk", "batch" or "sample"."""

    packing: str
    num_leaves: int  # with a size before each item; none in the chunks of a TokensLoader
    leaf: _Leaf


def _chunks(index: ForeignIndex, choices: Choices) -> "list[_Chunk]":
    tables = index.parts("chunks")
    layout = _layout(index.table("config"), choices, tables[0].raw.get("dim") is not None)
    return [_Chunk.open(table, layout) for table in tables]


def _layout(config: ForeignIndex, choices: Choices, has_dim: bool) -> _Layout:
    place = f"{config.path}: {config.place.rstrip('.')}"
    if config.raw.get("encryption"):
        raise UserError(f"{place} says that the chunks are encrypted", hint="optimize the data without encryption")
    compression, level = config.raw.get("compression"), config.raw.get("compression_level") or "chunk"
    loader = config.raw.get("item_loader") or ("TokensLoader" if has_dim else "PyTreeLoader")
    if loader not in ("TokensLoader", "PyTreeLoader"):
        raise UserError(f"{place} has items of {loader!r}; those of PyTreeLoader and TokensLoader are read", hint=_HOW)
    if compression is not None and str(compression).partition(":")[0] != "zstd":
        raise UserError(
            f"{place} has compression {compression!r}; zstd is read", hint="optimize with compression='zstd'"
        )
    if level not in ("chunk", "batch", "sample"):
        raise UserError(f"{place} has compression_level {level!r}; chunk, batch and sample are read", hint=_HOW)
    formats = config.texts("data_format")
    leaf = _choose_leaf(place, _leaf_names(config, len(formats)), formats, choices)
    if loader == "TokensLoader" and (len(formats) != 1 or leaf.form in _HEADED):
        raise damaged(f"{place} is of a TokensLoader but has data_format {formats}")
    return _Layout(level if compression else "", 0 if loader == "TokensLoader" else len(formats), leaf)


def _leaf_names(config: ForeignIndex, num_leaves: int) -> list[str]:
    """Return the keys of items that are flat dictionaries, else the leaves' numbers."""
    names: Any = None
    try:
        _, tree = orjson.loads(config.raw.get("data_spec") or "null")
        if "dict" in tree["type"].lower() and not any(child.get("type") for child in tree["children_spec"]):
            names = orjson.loads(tree["context"])
    except (ValueError, TypeError, KeyError, AttributeError):
        pass  # it is only asked for names
    sound = isinstance(names, list) and len(names) == num_leaves
    return [str(name) for name in (names if sound else range(num_leaves))]


def _choose_leaf(place: str, names: list[str], formats: list[str], choices: Choices) -> _Leaf:
    """Return the leaf named by `choices`, else the only one that may hold tokens."""
    leaves = list(zip(names, formats))
    number = choose_column(place, "leaf", leaves, _fits, choices, kinds="tensors, arrays or bytes", how=_HOW)
    form, _, code = formats[number].partition(":")
    dtype = _DTYPES[form][int(code)] if form in _DTYPES else None
    is_raw = form == "bytes"
    require_dtype(f"{place}: leaf {names[number]!r}", dtype or form, choices, is_raw=is_raw)
    return _Leaf(number, form, choices.dtype if is_raw else dtype)


def _fits(form: str) -> bool:
    kind, _, code = form.partition(":")
    if kind in _DTYPES:
        return re.fullmatch("[0-9]{1,2}", code) is not None and _DTYPES[kind].get(int(code)) in TOKEN_DTYPES
    return form == "bytes" or form in _HEADED


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One chunk as the index describes it; the chunks of one writer (`chunk-<writer>-<number>`) are one stream."""

    path: Path
    stream: str
    num_items: int
    chunk_bytes: int
    layout: _Layout

    has_borders = True

    @classmethod
    def open(cls, table: ForeignIndex, layout: _Layout) -> "_Chunk":
        path = table.file("filename")
        if not path.is_file():
            raise UserError(f"{table.path} names {path.name}, which is missing", hint=f"ls -l {quoted(path.parent)}")
        stream = str(path.parent / path.name.rpartition("-")[0])
        return cls(path, stream, table.number("chunk_size"), table.number("chunk_bytes"), layout)

    def samples(self) -> Iterator[tuple[Tokens, int]]:
        with open_exactly(self.path, "zstd" if self.layout.packing == "chunk" else "") as chunk:
            items = self._framed(chunk) if self.layout.packing == "batch" else self._plain(chunk)
            for number, (reader, size_bytes, base) in enumerate(items):
                yield self._tokens(reader, number, size_bytes, base)

    def _plain(self, reader: ExactReader) -> Iterator[tuple[ExactReader, int, int]]:
        """Yield for each item a reader at it, its size, and what to add to the reader's offset for the origin."""
        num_items = int.from_bytes(reader.read(4), "little")
        offsets = self._offsets(reader, num_items)
        # chunk_bytes counted the items alone in early versions
        if offsets[0] != reader.at or offsets[-1] not in (self.chunk_bytes, self.chunk_bytes + int(offsets[0])):
            raise damaged(
                f"{self.path}: its items are bytes {offsets[0]} to {offsets[-1]}, its index says {self.chunk_bytes}"
            )
        for size_bytes in np.diff(offsets).tolist():
            if self.layout.packing == "sample":
                base = reader.at
                yield *reader.unpack(size_bytes), base
            else:
                yield reader, size_bytes, 0
        reader.finish()

    def _framed(self, chunk: ExactReader) -> Iterator[tuple[ExactReader, int, int]]:
        """Items in frames of many; their offsets count from the first item's, all unpacked."""
        magic, version, _, num_items, _, num_frames = _FRAMED_HEAD.unpack(chunk.read(_FRAMED_HEAD.size))
        if magic != _FRAMED_MAGIC or version != 1:
            raise damaged(f"{self.path} begins with {magic!r} version {version}, no batches of items")
        offsets, item = self._offsets(chunk, num_items), 0
        if num_frames > num_items:
            raise damaged(f"{self.path} has {num_frames} batches of {num_items} items")
        for first, count, at_bytes, size_bytes, content_bytes in _FRAME.iter_unpack(
            chunk.read(_FRAME.size * num_frames)
        ):
            sizes = np.diff(offsets[first : first + count + 1]).tolist()
            if (first, at_bytes) != (item, chunk.at) or not count == len(sizes) > 0 or sum(sizes) != content_bytes:
                raise damaged(f"{self.path}: its batch of items from {first} does not fit them")
            frame = chunk.unpacking(size_bytes)
            for item_bytes in sizes:
                yield frame, item_bytes, int(offsets[first])
            frame.finish()
            item += count
        chunk.finish()
        if item != num_items:
            raise damaged(f"{self.path}: its batches hold {item} of {num_items} items")

    def _offsets(self, reader: ExactReader, num_items: int) -> Int64s:
        if num_items != self.num_items or (not self.layout.packing and 4 * num_items > self.path.stat().st_size):
            raise damaged(f"{self.path} says {num_items} items, its index {self.num_items}")
        offsets = reader.offsets(num_items + 1)
        if (np.diff(offsets) < 0).any():
            raise damaged(f"{self.path}: its items do not follow each other")
        return offsets

    def _tokens(self, reader: ExactReader, number: int, size_bytes: int, base: int) -> tuple[Tokens, int]:
        sizes: list[int | None] = [None] * self.layout.num_leaves or [size_bytes]
        sample = f"{self.path}: item {number}"
        at, data = read_column(reader, size_bytes, sizes, self.layout.leaf.number, sample, "leaves")
        tokens = self._decode(sample, data)
        return tokens, base + at + len(data) - tokens.nbytes

    def _decode(self, sample: str, data: bytes) -> Tokens:
        head, dtype, shape = 0, self.layout.leaf.dtype, None
        if self.layout.leaf.form in _HEADED:
            order, dtypes = _HEADED[self.layout.leaf.form]
            try:
                code, num_dims = struct.unpack_from(f"{order}II", data)
                head = 8 + 4 * num_dims
                shape = tuple(np.frombuffer(data, f"{order}u4", num_dims, 8).tolist())
                dtype = dtypes[code]
            except (KeyError, ValueError, struct.error):
                raise damaged(f"{sample} has no array of integers where its tokens should be") from None
        return tokens_in(data, head, str(dtype), shape, sample, _HOW)
