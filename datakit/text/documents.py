"""Documents: the texts of a slice of a file, one after the other, with their places; memory is one document's.

jsonl has one document a line (blank lines are skipped), txt one a file or one a line, parquet and Arrow one a row. The
texts of several keys or columns are joined by blank lines; nulls and missing ones are left out, and a document of
nothing else is not one. Whatever is wrong with the text is a UserError that names file, line and byte; only what the
rules say is skipped, and counted.
"""

import os
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import compress
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from datakit.files.remote_file import is_url
from datakit.text.blocks import READ_BYTES, digest_of, read_blocks
from datakit.text.columns import read_columns, rows_before
from datakit.text.formats import COLUMN_KINDS, SHOWN_BY, is_lines
from datakit.text.inputs import FileSlice, InputFile
from datakit.text.json_text import BOM, JsonText, LineFault, decode, null_text, require_lines
from threefold.errors import StorageError, UserError, quoted

MAX_LINE_BYTES = 1 << 30
_RUN_CHARACTERS, _RUN_DOCUMENTS = 1 << 18, 1024
_AT_ONCE_BYTES = 1 << 18  # more is a long line, of which no copy is made


class Document(NamedTuple):
    """A text and its place: byte offset in the (uncompressed) file, line from 0 in the slice, bytes of input.

    In files of columns the line is the row, the offset 0, and the bytes are those of the text.
    """

    text: str
    offset_bytes: int
    line: int
    input_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """Documents of one file as columns: their texts, and in `places` three rows, of offsets, lines and input bytes."""

    texts: list[str]
    places: npt.NDArray[np.int64]

    @classmethod
    def of(cls, documents: Sequence[Document]) -> "Documents":
        """Make columns of single documents."""
        places = np.array([document[1:] for document in documents], np.int64).reshape(-1, 3).T
        return cls([document.text for document in documents], places)

    def where(self, chosen: npt.NDArray[np.bool_]) -> "Documents":
        """Return the documents that are chosen, of a flag for each."""
        return Documents(list(compress(self.texts, chosen)), self.places[:, chosen])

    @property
    def input_bytes(self) -> int:
        """The bytes of input of all together."""
        return int(self.places[2].sum())

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, part: slice) -> "Documents":
        return Documents(self.texts[part], self.places[:, part])

    def __add__(self, others: "Documents") -> "Documents":
        return Documents(self.texts + others.texts, np.concatenate([self.places, others.places], axis=1))

    def __iter__(self) -> Iterator[Document]:
        return map(Document, self.texts, *self.places.tolist())


@dataclass(frozen=True, slots=True)
class DocumentRules:
    """What a document is, and which documents are skipped.

    `text_key` names one key or column, or several with commas between; `txt_split` is "file" (one document a txt file)
    or "line". Skipped are, where asked for: documents that cannot be read (no valid JSON or UTF-8, no text under the
    key), documents empty but for white space, and documents of more than `max_chars` characters. By the rules of older
    stores, `nulls_are_empty`: a row of nulls is an empty document.
    """

    text_key: str = "text"
    txt_split: str = "file"
    skip_invalid: bool = False
    skip_empty: bool = False
    max_chars: int | None = None
    nulls_are_empty: bool = False


class DocumentReader:
    """Iterates over the documents of one slice, in order.

    `num_lines` counts the lines passed so far, `skipped` the documents among them that were skipped, by reason,
    `num_replaced` those whose lone surrogates were replaced. Once all documents were given, the file was the one that
    was found; `with_digest` then makes `digest`, the XXH3-64 of the slice's bytes as they are in the file.
    """

    def __init__(
        self,
        part: FileSlice,
        rules: DocumentRules,
        *,
        with_digest: bool = False,
        read_bytes: int = READ_BYTES,
        max_line_bytes: int = MAX_LINE_BYTES,
    ) -> None:
        self._part, self._rules, self._read_bytes, self._max_line_bytes = part, rules, read_bytes, max_line_bytes
        self._keys = list(dict.fromkeys(rules.text_key.split(",")))
        self._json = JsonText(self._keys)
        self._hash = xxhash.xxh3_64() if with_digest else None
        self._filters = rules.skip_empty or rules.max_chars is not None
        self.num_lines = 0
        self.skipped: Counter[str] = Counter()
        self.digest = ""

    @property
    def num_replaced(self) -> int:
        return self._json.num_replaced

    def __iter__(self) -> Iterator[Document]:
        for run in self.runs():
            yield from run

    def runs(self) -> Iterator[Documents]:
        """Return the documents some at a time: together 256 Ki characters and one document, or a block of lines."""
        if self._part.file.kind == "jsonl":
            for offset, lines in self._whole_lines():
                run = self._read_at_once(offset, lines) if len(lines) <= _AT_ONCE_BYTES else None
                yield from self._runs_of(_split(offset, lines)) if run is None else [run]
        else:
            yield from self._runs_of(self._contents())
        self._finish()

    def _read_at_once(self, offset: int, lines: bytes) -> Documents | None:
        """Return the documents of whole lines, in half the time that single lines take.

        None if any line is not plain.
        """
        texts = self._json.find_all(lines)
        if texts is None:
            return None
        ends = np.flatnonzero(np.frombuffer(lines, np.uint8) == ord("\n")) + 1
        if not lines.endswith(b"\n"):
            ends = np.append(ends, len(lines))
        begins = np.concatenate([[0], ends[:-1]])
        numbers = np.arange(self.num_lines, self.num_lines + len(texts))
        self.num_lines += len(texts)
        run = Documents(texts, np.stack([offset + begins, numbers, ends - begins]))
        if not self._filters:
            return run
        reasons = list(map(self._reason_to_skip, texts))
        self.skipped.update(filter(None, reasons))
        return run.where(np.array([reason is None for reason in reasons]))

    def _runs_of(self, contents: Iterable[tuple[int, bytes | None]]) -> Iterator[Documents]:
        run, characters = list[Document](), 0
        try:
            for document in self._documents(contents):
                run.append(document)
                characters += len(document.text)
                if characters >= _RUN_CHARACTERS or len(run) == _RUN_DOCUMENTS:
                    yield Documents.of(run)
                    run, characters = [], 0
        except Exception:
            yield Documents.of(run)  # what comes before the fault is not lost
            raise
        yield Documents.of(run)

    def _documents(self, contents: Iterable[tuple[int, bytes | None]]) -> Iterator[Document]:
        """Yield the documents one by one; one without content has no text."""
        find_text, is_json = self._json.find, self._part.file.kind == "jsonl"
        mark = "" if self._part.file.kind in COLUMN_KINDS.values() else BOM
        ends = b"\r\n" if self._is_text_lines() else b""
        for line, (offset, content) in enumerate(contents, self.num_lines):
            self.num_lines, self._json.is_first = line + 1, line == self._part.start == 0
            try:
                if content is None:
                    raise self._no_text()
                if is_json:
                    if content.isspace() or (text := find_text(content)) is None:
                        continue
                else:
                    text = decode(content.rstrip(ends)).removeprefix(mark)
            except LineFault as fault:
                if not self._rules.skip_invalid:
                    raise self._placed(fault, offset, line, content or b"") from None
                self.skipped["invalid"] += 1
                continue
            except MemoryError:
                assert content is not None, "only what there is takes memory"
                raise self._too_large(len(content)) from None
            if self._filters and (reason := self._reason_to_skip(text)):
                self.skipped[reason] += 1
                continue
            yield Document(text, offset, line, len(content))

    def _contents(self) -> Iterator[tuple[int, bytes | None]]:
        """Offset and bytes of each line, or of what else holds one document."""
        part = self._part
        if not is_lines(part.file.kind):
            return self._rows()
        if part.file.kind == "txt" and not self._is_text_lines():
            return iter([(0, self._whole_text())])
        return (line for offset, lines in self._whole_lines() for line in _split(offset, lines))

    def _rows(self) -> Iterator[tuple[int, bytes | None]]:
        """Return the joined texts of each row, None for one without a text."""
        nulls_are_empty = self._rules.nulls_are_empty
        is_lenient = self._rules.skip_invalid and not nulls_are_empty
        for values in read_columns(self._part, self._keys, is_lenient=is_lenient):
            yield 0, b"\n\n".join(filter(None, values)) if values or nulls_are_empty else None

    def _no_text(self) -> LineFault:
        """Return the fault of a row without a text."""
        if len(self._keys) == 1:
            return null_text(self._keys[0])
        return LineFault(f"no column {' or '.join(map(repr, self._keys))} with a text")

    def _is_text_lines(self) -> bool:
        return self._part.file.kind == "txt" and self._rules.txt_split == "line"

    def _whole_text(self) -> bytes:
        """Return the content of a text file that is one document."""
        size_bytes = self._part.stop - self._part.start
        if size_bytes > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
            raise self._too_large(size_bytes)
        try:
            return b"".join(read_blocks(self._part, self._hash))
        except MemoryError:
            raise self._too_large(size_bytes) from None

    def _finish(self) -> None:
        """Check that the file did not change meanwhile, and keep the digest of what was read."""
        part = self._part
        part.file.require_unchanged()
        if self._hash is not None:
            is_read = is_lines(part.file.kind)  # tables are not read from front to back
            self.digest = self._hash.hexdigest() if is_read else digest_of(part.file, part.start, part.stop)

    def _reason_to_skip(self, text: str) -> str | None:
        if self._rules.skip_empty and (not text or text.isspace()):
            return "empty"
        if self._rules.max_chars is not None and len(text) > self._rules.max_chars:
            return "too_long"
        return None

    def _placed(self, fault: LineFault, offset: int, line: int, content: bytes) -> UserError:
        """Return a fault with its place; what comes before the slice is counted only now, when one is named."""
        part, message, hint = self._part, fault.message, fault.hint
        if not is_lines(part.file.kind):
            row = rows_before(part, self._keys) + line + 1
            at = "" if fault.byte is None else f" at byte {fault.byte}"
            return UserError(f"{part.file.shown}, row {row}: {message}{at}", hint="--skip-invalid")
        if part.file.kind == "jsonl" and part.start:
            require_lines(part.file, next(read_blocks(FileSlice(part.file, 0, part.file.size_bytes))))
        before = read_blocks(FileSlice(part.file, 0, part.start)) if part.start else ()
        is_seen = not part.file.spooled and not is_url(part.file.path)
        shown = f"{SHOWN_BY[part.file.compression]} {quoted(part.file.path)}"
        line += sum(block.count(b"\n") for block in before) + content.count(b"\n", 0, fault.byte or 0) + 1
        if fault.byte is not None:
            message += f" at byte {offset + fault.byte}"
            is_utf16 = offset == 0 and content.startswith((BOM_UTF16_LE, BOM_UTF16_BE))
            encoding, why = ("UTF-16", "as its first bytes say") if is_utf16 else ("LATIN1", "if it is Latin-1")
            convert = f"iconv -f {encoding} -t UTF-8"
            if part.file.spooled:
                hint = f"COMMAND | {convert} | datakit preprocess - ..., {why}"
            elif is_seen:
                hint = f"{shown} | {convert} > FIXED.{part.file.kind}, {why}"
        return UserError(
            f"{part.file.shown}, line {line}: {message}",
            hint=hint or (f"{shown} | sed -n {line}p" if is_seen else "--skip-invalid"),
        )

    def _whole_lines(self) -> Iterator[tuple[int, bytes]]:
        """Offset and bytes of some whole lines at a time, newlines included; a line over several blocks comes alone."""
        part, offset = self._part, self._part.start
        rest: list[bytes] = []  # a line that goes on in the next block
        rest_bytes = 0
        for block in read_blocks(part, self._hash, self._read_bytes):
            if offset == 0 and not rest and part.file.kind == "jsonl":
                require_lines(part.file, block)
            begin, end = 0, block.rfind(b"\n") + 1
            if rest and end:
                begin = block.index(b"\n") + 1
                line = b"".join([*rest, block[:begin]])
                rest, rest_bytes = [], 0
                yield offset, line
                offset += len(line)
            if begin < end:
                yield offset, block[begin:end]
                offset += end - begin
            if end < len(block):
                rest.append(block[end:])
                rest_bytes += len(block) - end
            if rest_bytes > self._max_line_bytes:
                raise UserError(
                    f"{part.file.path}: the line at byte {offset} is longer than {self._max_line_bytes} bytes",
                    hint="one JSON document a line; is this file jsonl?",
                )
        if rest_bytes:
            yield offset, b"".join(rest)

    def _too_large(self, size_bytes: int) -> StorageError:
        file = self._part.file
        return StorageError(
            f"{file.path}: a document of {size_bytes:,} bytes does not fit into memory", hint=memory_hint(file)
        )


def memory_hint(file: InputFile) -> str:
    """Return what to try if memory does not suffice for a file."""
    return "give fewer --workers" + ", or --txt-split line if each line is a document" * (file.kind == "txt")


def _split(offset: int, lines: bytes) -> Iterator[tuple[int, bytes]]:
    """Offset and bytes of each line."""
    for line in BytesIO(lines):
        yield offset, line
        offset += len(line)
