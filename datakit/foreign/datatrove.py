"""Datatrove: tokenized `.ds` files into a store; `.ds.index` parts documents, `.ds.metadata` the token size.

A `.ds` is tokens of 2 or 4 bytes back to back, little-endian; its index the u64 ends of the documents, in tokens; its
metadata three lines, the first `<tokenizer>|<token size>`, the second the number of tokens. Memory is 8 MiB or one
document, and windows of the index.
"""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from datakit.files.durable import blocks_of
from datakit.foreign.exact_reader import ExactReader, damaged, open_exactly
from datakit.foreign.foreign_store import Choices, Pieces, store_of_files
from datakit.format.shard import Int64s, Tokens
from datakit.store.token_store import TokenStore
from threefold.errors import UserError, listing, quoted

SUFFIX = ".ds"
_DTYPES = {2: "uint16", 4: "uint32"}
_SIZES = {dtype: size for size, dtype in _DTYPES.items()}
_MAX_METADATA_BYTES = 1 << 20
_NUMBERED, _MAX_NAMED = re.compile(r"([0-9]{1,9})_"), 5


def from_datatrove(
    sources: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str], choices: Choices
) -> TokenStore:
    """Make a store of `.ds` files, or of all in folders, in the order of their names.

    UserError if a loss mask hides tokens, which a store cannot say, or if the numbers of a folder's files leave any
    out. A `.ds` without index is one stream.
    """
    folders = [ds_files(Path(source)) for source in sources]
    for absent in filter(None, map(absent_numbers, folders)):
        raise UserError(
            f"{absent}: lost, or of tasks that had no document",
            hint="fetch what is lost; if nothing is, name the files that are there, *.ds",
        )
    files = [_DsFile.open(path, choices.dtype, choices.pieces) for folder in folders for path in folder]
    inputs = [path for file in files for path in (file.path, file.index) if path is not None]
    return store_of_files("datatrove", files, inputs, output, choices)


def ds_files(source: Path) -> list[Path]:
    """Return the `.ds` files that a file or folder names; UserError if there are none."""
    if source.suffix == SUFFIX and source.is_file():
        return [source]
    files = sorted(source.glob(f"*{SUFFIX}")) if source.is_dir() else []
    if not files:
        raise UserError(f"{source} is not a .ds file, nor a folder with any", hint=listing(source))
    return files


def absent_numbers(files: Sequence[Path]) -> str:
    """Return in words which numbers the files of a folder leave out, empty if none; each task has a file of its own.

    Of `00000_a.ds`, `00001_a.ds` and `00003_a.ds` that is 2.
    """
    numbers = {int(match[1]) for path in files if (match := _NUMBERED.match(path.name))}
    absent = list(
        islice((number for number in range(max(numbers, default=0)) if number not in numbers), _MAX_NAMED + 1)
    )
    if not absent or len(numbers) == 1:
        return ""
    named = ", ".join(map(str, absent[:_MAX_NAMED])) + (" and more" if len(absent) > _MAX_NAMED else "")
    return f"{files[0].parent} has no .ds file of number {named}"


@dataclass(frozen=True, slots=True)
class _DsFile:
    """One `.ds` whose token size is known and fits its own size."""

    path: Path
    index: Path | None
    dtype: str
    num_tokens: int
    pieces: Pieces

    @classmethod
    def open(cls, path: Path, dtype: str | None, pieces: Pieces) -> "_DsFile":
        index, size_bytes = path.with_name(f"{path.name}.index"), path.stat().st_size
        _refuse_masks(path.with_name(f"{path.name}.loss"))
        file = cls(path, index if index.exists() else None, "", 0, pieces)
        metadata = path.with_name(f"{path.name}.metadata")
        known = _metadata_dtype(metadata) or file._dtype_of_index(size_bytes)
        if dtype is not None and (dtype not in _SIZES or dtype != (known or dtype)):
            raise UserError(f"{path} has {known or 'uint16 or uint32'} tokens, not {dtype}", hint="leave out --dtype")
        known = known or dtype
        if known is None:
            raise UserError(
                f"{path} has neither metadata nor an index that say the size of its tokens",
                hint="--dtype uint16, or uint32 where the vocabulary has more than 65,536 tokens",
            )
        num_tokens, rest = divmod(size_bytes, _SIZES[known])
        if rest:
            raise damaged(f"{path} has {size_bytes} bytes, no whole number of {known} tokens")
        if (said := _metadata_tokens(metadata)) not in (None, num_tokens):
            raise damaged(f"{path} has {num_tokens} tokens, its metadata says {said}")
        return replace(file, dtype=known, num_tokens=num_tokens)

    @property
    def stream(self) -> str:
        return str(self.path)

    @property
    def has_borders(self) -> bool:
        return self.index is not None

    def samples(self) -> Iterator[tuple[Tokens, int]]:
        dtype = np.dtype(self.dtype).newbyteorder("<")
        with open_exactly(self.path) as reader:
            if self.index is None:
                yield from self._blocks(reader, dtype)
            for first, ends in self._windows():
                starts = [first, *ends[:-1].tolist()]
                for start, end in zip(starts, ends.tolist()):
                    yield np.frombuffer(reader.read((end - start) * dtype.itemsize), dtype), start * dtype.itemsize
            reader.finish()

    def _blocks(self, reader: ExactReader, dtype: "np.dtype[np.unsignedinteger]") -> Iterator[tuple[Tokens, int]]:
        size_bytes = self.num_tokens * dtype.itemsize
        while reader.at < size_bytes:
            at = reader.at
            yield np.frombuffer(reader.read(min(self.pieces.block_bytes, size_bytes - at)), dtype), at

    def _windows(self) -> Iterator[tuple[int, Int64s]]:
        """Windows of documents: the token where the first begins, and where each ends; CheckFailed for nonsense."""
        if self.index is None:
            return
        end_before, document, num_ends = 0, 0, self._num_documents()
        with open_exactly(self.index) as reader:
            while document < num_ends:
                count = min(self.pieces.window_documents, num_ends - document)
                ends = np.frombuffer(reader.read(8 * count), "<u8")
                wrong = np.flatnonzero((ends < np.append(np.uint64(end_before), ends[:-1])) | (ends > self.num_tokens))
                if len(wrong):
                    raise damaged(
                        f"{self.index}: document {document + int(wrong[0])} ends at token {ends[wrong[0]]}, "
                        f"before it begins or after the {self.num_tokens} tokens of its file"
                    )
                yield end_before, ends.astype(np.int64)
                end_before, document = int(ends[-1]), document + len(ends)
        if end_before != self.num_tokens:
            raise damaged(f"{self.path} has {self.num_tokens} tokens, its index ends at token {end_before}")

    def _num_documents(self) -> int:
        assert self.index is not None
        size_bytes = self.index.stat().st_size
        if size_bytes % 8:
            raise damaged(f"{self.index} has {size_bytes} bytes, no whole number of u64")
        return size_bytes // 8

    def _dtype_of_index(self, size_bytes: int) -> str | None:
        """Return the dtype of which the file has as many tokens as the index.

        None without an index or a token.
        """
        if self.index is None or not (num_documents := self._num_documents()):
            return None
        with self.index.open("rb") as file:
            file.seek(8 * (num_documents - 1))
            num_tokens = int.from_bytes(file.read(8), "little")
        return next((dtype for size, dtype in _DTYPES.items() if num_tokens and num_tokens * size == size_bytes), None)


def _metadata_dtype(path: Path) -> str | None:
    """Return the dtype that a `.ds.metadata` says; None if there is none, or one of an age that does not say it."""
    _, bar, size = _metadata_lines(path)[0].rpartition("|")
    if not bar:
        return None
    dtype = _DTYPES.get(int(size)) if size.isdecimal() and len(size) == 1 else None
    if dtype is None:
        raise damaged(f"{path}: token size {size[:80]!r} is neither 2 nor 4")
    return dtype


def _metadata_tokens(path: Path) -> int | None:
    """Return the number of tokens that a `.ds.metadata` says; None if it says none."""
    lines = _metadata_lines(path)
    text = lines[1].strip() if "|" in lines[0] and len(lines) > 1 else ""
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def _metadata_lines(path: Path) -> list[str]:
    """Return the lines of a `.ds.metadata`, an empty one if there is none."""
    if not path.exists():
        return [""]
    with path.open("rb") as file:
        return file.read(_MAX_METADATA_BYTES).decode("utf-8", "replace").split("\n")


def _refuse_masks(path: Path) -> None:
    """Raise UserError if a loss mask (one byte a token) hides any token; a mask that hides none is passed over."""
    if path.exists() and any(block.count(1) != len(block) for block in blocks_of(path)):
        raise UserError(
            f"{path} masks tokens from the loss, a store cannot",
            hint=f"mv {quoted(path)} {quoted(path)}.off, to convert the tokens alone",
        )
