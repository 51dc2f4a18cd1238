"""Documents: the texts of a slice of a file, one after the other, with their places; memory is one document's.

jsonl gives one document a line (blank lines are skipped), txt one a file or one a line, parquet and Arrow one a row (a
null is a document without text). The texts of several keys or columns are joined by blank lines. Whatever is wrong with
the text is a UserError that names file, line and byte: nothing is skipped or repaired in silence.
"""

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import orjson
import zstandard

from datakit.columns import read_columns, rows_before
from datakit.inputs import FileSlice, is_lines, open_file
from threefold.errors import StorageError, UserError

MAX_LINE_BYTES = 1 << 30
_READ_BYTES = 1 << 20
_ZSTD_READ_BYTES = 8 << 10  # zstd may expand a few bytes to 128 KiB: small reads bound what comes out at once
_ZSTD_WINDOW_BYTES = 1 << 31  # archives made with `zstd --long=31` need it; memory is what a file's own window takes


@dataclass(frozen=True, slots=True)
class Document:
    """A text and where it stands: byte offset in the (uncompressed) file, line from 0 in the slice, bytes of input.

    In files of columns the line is the row, the offset 0, and the bytes are those of the text.
    """

    text: str
    offset_bytes: int
    line: int
    input_bytes: int


class DocumentReader:
    """Iterates over the documents of one slice, in order; `num_lines` counts the lines passed so far."""

    def __init__(self, part: FileSlice, *, text_key: str = "text", txt_split: str = "file") -> None:
        """`text_key` names one key or column, or several with commas between; `txt_split` is "file" (one document a txt
        file) or "line"."""
        self._part, self._keys, self._txt_split = part, list(dict.fromkeys(text_key.split(","))), txt_split
        self.num_lines = 0

    def __iter__(self) -> Iterator[Document]:
        part = self._part
        if part.file.kind == "txt" and self._txt_split == "file":
            content = b"".join(_blocks(part))
            yield Document(_decode(content, part, 0, 0), 0, 0, len(content))
            return
        if not is_lines(part.file):
            yield from self._rows()
            return
        for line, (offset, content) in enumerate(_lines(part)):
            self.num_lines = line + 1
            if part.file.kind == "jsonl":
                if content.isspace():
                    continue
                text = _json_text(content, part, offset, line, self._keys)
            else:
                text = _decode(content.rstrip(b"\r\n"), part, offset, line)
            yield Document(text, offset, line, len(content))

    def _rows(self) -> Iterator[Document]:
        part = self._part
        for row, values in enumerate(read_columns(part, self._keys)):
            self.num_lines = row + 1
            content = b"\n\n".join(filter(None, values))
            try:
                text = content.decode()
            except UnicodeDecodeError as error:
                place = f"{part.file.path}, row {rows_before(part, self._keys) + row + 1}"
                raise UserError(
                    f"{place}: invalid UTF-8: {error.reason} 0x{content[error.start]:02x} at byte {error.start}",
                    hint=f"write the column {self._keys[0]!r} as UTF-8",
                ) from None
            yield Document(text, 0, row, len(content))


def _json_text(content: bytes, part: FileSlice, offset: int, line: int, keys: list[str]) -> str:
    try:
        value = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        _decode(content, part, offset, line)  # invalid UTF-8 is told as what it is
        raise UserError(f"{_place(part, line)}: invalid JSON: {error}", hint=_show(part, line)) from None
    if not isinstance(value, dict):
        raise UserError(f"{_place(part, line)}: no JSON object", hint=_show(part, line))
    if len(keys) == 1 and isinstance(text := value.get(keys[0]), str):
        return text
    found = {key: value[key] for key in keys if key in value and (value[key] is not None or len(keys) == 1)}
    if not found:
        asked = " or ".join(map(repr, keys)) + " with a text" * (len(keys) > 1)
        others = ", ".join(map(repr, value)) or "none"
        texts = [name for name, other in value.items() if isinstance(other, str)]
        hint = f"--text-key {max(texts, key=lambda name: len(value[name]))}" if texts else _show(part, line)
        raise UserError(f"{_place(part, line)}: no key {asked}; its keys: {others}", hint=hint)
    for key, other in found.items():
        if not isinstance(other, str):
            kind = type(other).__name__
            raise UserError(f"{_place(part, line)}: {key!r} is no text but {kind}", hint=_show(part, line))
    return "\n\n".join(filter(None, found.values()))


def _decode(content: bytes, part: FileSlice, offset: int, line: int) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line += content.count(b"\n", 0, error.start)
        raise UserError(
            f"{_place(part, line)}: invalid UTF-8: {error.reason} "
            f"0x{content[error.start]:02x} at byte {offset + error.start}",
            hint=f"iconv -f LATIN1 -t UTF-8 {part.file.path} -o FIXED, if it is Latin-1",
        ) from None


def _place(part: FileSlice, line: int) -> str:
    """`file, line N`; the lines before the slice are counted only now, where one is named."""
    return f"{part.file.path}, line {_lines_before(part) + line + 1}"


def _show(part: FileSlice, line: int) -> str:
    """A command that shows one line."""
    reader = {"": "cat", "gz": "zcat", "zst": "zstdcat"}[part.file.compression]
    return f"{reader} {part.file.path} | sed -n {_lines_before(part) + line + 1}p"


def _lines_before(part: FileSlice) -> int:
    count, remaining = 0, part.start
    if remaining:
        with open_file(part.file.path) as stream:
            while remaining and (block := stream.read(min(_READ_BYTES, remaining))):
                count += block.count(b"\n")
                remaining -= len(block)
    return count


def _lines(part: FileSlice) -> Iterator[tuple[int, bytes]]:
    """Offset and bytes of each line, its newline included."""
    offset = part.start
    rest: list[bytes] = []  # a line that goes on in the next block
    rest_bytes = 0
    for block in _blocks(part):
        at = 0
        while (newline := block.find(b"\n", at)) >= 0:
            rest.append(block[at : newline + 1])
            content = b"".join(rest)
            yield offset, content
            offset += len(content)
            rest, rest_bytes, at = [], 0, newline + 1
        rest.append(block[at:])
        rest_bytes += len(block) - at
        if rest_bytes > MAX_LINE_BYTES:
            raise UserError(
                f"{part.file.path}: the line at byte {offset} is longer than {MAX_LINE_BYTES} bytes",
                hint="one JSON document a line; is this file jsonl?",
            )
    if rest_bytes:
        yield offset, b"".join(rest)


def _blocks(part: FileSlice) -> Iterator[bytes]:
    """The uncompressed bytes of a slice, at most a few MiB at a time."""
    path = part.file.path
    with open_file(path) as stream:
        try:
            if part.file.compression == "gz":
                yield from _gzip_blocks(stream)
            elif part.file.compression == "zst":
                yield from _zstd_blocks(stream)
            else:
                yield from _plain_blocks(stream, part)
        except EOFError:
            raise UserError(
                f"{path} is truncated: its compressed data ends too early", hint="copy or download it again"
            ) from None
        except (gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
            raise UserError(f"{path} is damaged: {error}", hint="copy or download it again") from None
        except OSError as error:
            raise StorageError(f"cannot read {path}: {error.strerror}", hint=f"ls -l {path}") from error


def _plain_blocks(stream: BinaryIO, part: FileSlice) -> Iterator[bytes]:
    stream.seek(part.start)
    remaining = part.stop - part.start
    while remaining:
        block = stream.read(min(_READ_BYTES, remaining))
        if not block:
            raise UserError(f"{part.file.path} became shorter while it was read", hint="rerun when it is complete")
        remaining -= len(block)
        yield block


def _gzip_blocks(stream: BinaryIO) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=stream) as unpacked:
        while block := unpacked.read(_READ_BYTES):
            yield block


def _zstd_blocks(stream: BinaryIO) -> Iterator[bytes]:
    """All frames of a file; EOFError where the last is cut off, which zstandard's own readers pass in silence."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
    frame = decompressor.decompressobj()
    begun = False
    while packed := stream.read(_ZSTD_READ_BYTES):
        while packed:
            begun = True
            if block := frame.decompress(packed):
                yield block
            if not frame.eof:
                break
            packed = frame.unused_data
            frame, begun = decompressor.decompressobj(), False
    if begun:
        raise EOFError
