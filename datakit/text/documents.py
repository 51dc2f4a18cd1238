"""Documents: the texts of a slice of a file, one after the other, with their places; memory is one document's.

jsonl gives one document a line (blank lines are skipped), txt one a file or one a line, parquet and Arrow one a row (a
null is a document without text). The texts of several keys or columns are joined by blank lines. Whatever is wrong with
the text is a UserError that names file, line and byte; only what the rules say is skipped, and counted.
"""

import gzip
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from typing import BinaryIO, NamedTuple

import orjson
import zstandard

from datakit.text.columns import read_columns, rows_before
from datakit.text.inputs import FileSlice, is_lines, open_file
from datakit.text.remote_file import is_url
from threefold.errors import StorageError, UserError

MAX_LINE_BYTES = 1 << 30
_READ_BYTES = 256 << 10  # well below what an allocator takes from the system anew each time
_ZSTD_READ_BYTES = 8 << 10  # zstd may expand a few bytes to 128 KiB: small reads bound what comes out at once
_ZSTD_WINDOW_BYTES = 1 << 31  # archives made with `zstd --long=31` need it; memory is what a file's own window takes


class Document(NamedTuple):
    """A text and where it stands: byte offset in the (uncompressed) file, line from 0 in the slice, bytes of input.

    In files of columns the line is the row, the offset 0, and the bytes are those of the text.
    """

    text: str
    offset_bytes: int
    line: int
    input_bytes: int


@dataclass(frozen=True, slots=True)
class DocumentRules:
    """What a document is, and which documents are skipped.

    `text_key` names one key or column, or several with commas between; `txt_split` is "file" (one document a txt file)
    or "line". Skipped are, where asked for: documents that cannot be read (no valid JSON or UTF-8, no text under the
    key), documents empty but for white space, and documents of more than `max_chars` characters.
    """

    text_key: str = "text"
    txt_split: str = "file"
    skip_invalid: bool = False
    skip_empty: bool = False
    max_chars: int | None = None


class DocumentReader:
    """Iterates over the documents of one slice, in order.

    `num_lines` counts the lines passed so far, `skipped` the documents among them that were skipped, by reason.
    """

    def __init__(self, part: FileSlice, rules: DocumentRules) -> None:
        self._part, self._rules = part, rules
        self._keys = list(dict.fromkeys(rules.text_key.split(",")))
        self.num_lines = 0
        self.skipped: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Document]:
        rules, keys, is_json = self._rules, self._keys, self._part.file.kind == "jsonl"
        ends = b"\r\n" if self._part.file.kind == "txt" and rules.txt_split == "line" else b""
        filters = rules.skip_empty or rules.max_chars is not None
        for line, (offset, content) in enumerate(self._contents()):
            self.num_lines = line + 1
            try:
                if is_json:
                    if content.isspace():
                        continue
                    text = _json_text(content, keys)
                else:
                    text = _decode(content.rstrip(ends))
            except _Fault as fault:
                if not rules.skip_invalid:
                    raise self._told(fault, offset, line, content) from None
                self.skipped["invalid"] += 1
                continue
            if filters and (reason := self._reason_to_skip(text)):
                self.skipped[reason] += 1
                continue
            yield Document(text, offset, line, len(content))

    def _contents(self) -> Iterator[tuple[int, bytes]]:
        """Offset and bytes of each line, or of what else holds one document."""
        part = self._part
        if not is_lines(part.file):
            return ((0, b"\n\n".join(filter(None, values))) for values in read_columns(part, self._keys))
        if part.file.kind == "txt" and self._rules.txt_split == "file":
            return iter([(0, b"".join(_blocks(part)))])
        return _lines(part)

    def _reason_to_skip(self, text: str) -> str | None:
        if self._rules.skip_empty and (not text or text.isspace()):
            return "empty"
        if self._rules.max_chars is not None and len(text) > self._rules.max_chars:
            return "too_long"
        return None

    def _told(self, fault: "_Fault", offset: int, line: int, content: bytes) -> UserError:
        """A fault with its place; what comes before the slice is counted only now, where one is named."""
        part, message, hint = self._part, fault.message, fault.hint
        if not is_lines(part.file):
            row = rows_before(part, self._keys) + line + 1
            return UserError(f"{part.file.path}, row {row}: {message} at byte {fault.byte}", hint="--skip-invalid")
        line += _lines_before(part) + content.count(b"\n", 0, fault.byte or 0) + 1
        if fault.byte is not None:
            message += f" at byte {offset + fault.byte}"
            hint = f"iconv -f LATIN1 -t UTF-8 {part.file.path} -o FIXED, if it is Latin-1"
        show = {"": "cat", "gz": "zcat", "zst": "zstdcat"}[part.file.compression]
        look = "--skip-invalid" if is_url(part.file.path) else f"{show} {part.file.path} | sed -n {line}p"
        return UserError(f"{part.file.path}, line {line}: {message}", hint=hint or look)


class _Fault(Exception):
    """What is wrong with one document, the byte of it where that is known, and a hint better than to look at it."""

    def __init__(self, message: str, *, byte: int | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message, self.byte, self.hint = message, byte, hint


def _json_text(content: bytes, keys: list[str]) -> str:
    try:
        value = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        _decode(content)  # invalid UTF-8 is told as what it is
        raise _Fault(f"invalid JSON: {error}") from None
    if not isinstance(value, dict):
        raise _Fault("no JSON object")
    if len(keys) == 1 and isinstance(text := value.get(keys[0]), str):
        return text
    found = {key: value[key] for key in keys if key in value and (value[key] is not None or len(keys) == 1)}
    if not found:
        asked = " or ".join(map(repr, keys)) + " with a text" * (len(keys) > 1)
        others = ", ".join(map(repr, value)) or "none"
        texts = [name for name, other in value.items() if isinstance(other, str)]
        hint = f"--text-key {max(texts, key=lambda name: len(value[name]))}" if texts else None
        raise _Fault(f"no key {asked}; its keys: {others}", hint=hint)
    for key, other in found.items():
        if not isinstance(other, str):
            raise _Fault(f"{key!r} is no text but {type(other).__name__}")
    return "\n\n".join(filter(None, found.values()))


def _decode(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise _Fault(f"invalid UTF-8: {error.reason} 0x{content[error.start]:02x}", byte=error.start) from None


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
        for content in BytesIO(block):
            if not content.endswith(b"\n"):
                rest.append(content)
                rest_bytes += len(content)
                continue
            if rest:
                content = b"".join([*rest, content])
                rest, rest_bytes = [], 0
            yield offset, content
            offset += len(content)
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
    with open_file(path, stop=part.stop) as stream:
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
