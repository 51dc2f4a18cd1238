"""GigatokenEncoder: gigatoken in place of a tokenizer's reference, with the reference's ids for every document.

The engine runs on terms that a probe has found (see encoder.py): what a post-processor puts around a text goes around
its ids, and a document of which it may think otherwise goes to the reference, alone. It keeps every distinct word it
has met for ever, so it is loaded again where its memory has grown.

Engines may differ on characters that a newer Unicode knows and an older one does not. What is a letter, a number or a
combining mark decides where text is split and how it is normalized. Engines carry tables of their own, from Unicode 10
(the marks in tokenizers' normalizers) to 17. All other characters have had the same properties since.
"""

import base64
import os
import re
import tempfile
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from datakit.tokenization import rank_file
from datakit.tokenization.encoded import Encoded, Ids
from datakit.tokenization.rank_file import RankFile, is_rank_file, is_tekken, read_rank_file, read_tekken
from datakit.tokenization.tokenizer import TextFault, Tokenizer, gave_up, open_tokenizer

MAX_CACHE_BYTES, CHECK_CHARACTERS = 96 << 20, 4 << 20
# Between lines, where no engine doubts what the characters are: before the newline, or for patterns that put it to the
# punctuation before it, after it.
_CUTS = re.compile(r"(?<=[!-~])(?=\n)"), re.compile(r"(?<=[!-~]\n)(?=[0-9A-Za-z])")
_MAX_PADDING = 4  # a batch comes as rows of the longest document: at most this many times its characters, and some
_FREE_PADDING = 1 << 16
_SHORT_CHARACTERS = 1 << 10  # longer documents take the engine longer than the call
FIRST_CHARACTERS = 1 << 20  # are taken one by one: a first batch makes the library import others for half a second

SPLITTERS = {  # gigatoken's, by the pattern of tiktoken that they split as
    rank_file.GPT2_PATTERN: "gpt2",
    rank_file.R50K_PATTERN: "gpt2",
    rank_file.CL100K_PATTERN: "cl100k",
    rank_file.LLAMA3_PATTERN: "olmo3",
    rank_file.QWEN_PATTERN: "qwen2",
    rank_file.O200K_PATTERN: "o200k",
    rank_file.TEKKEN_PATTERN: "nemotron",
}


@dataclass(frozen=True, slots=True)
class Terms:
    """On what terms the engine replaces the reference.

    Ids `before` and `after` go around each document. One in whose text the engine finds one of the `doubted` ids, or
    which holds one of the doubted `characters`, is the reference's.
    """

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    doubted: tuple[int, ...] = ()
    characters: tuple[str, ...] = ()


NO_TERMS = Terms()


class GigatokenEncoder:
    """gigatoken over a file of any kind; its cache is kept below about 96 MiB."""

    def __init__(
        self,
        path: Path,
        terms: Terms | None = None,
        *,
        max_cache_bytes: int = MAX_CACHE_BYTES,
        check_characters: int = CHECK_CHARACTERS,
    ) -> None:
        """Open the engine; without terms, those that hold for any text are the reference's frame and no doubt.

        Every `check_characters` it is looked whether the cache is within its bytes.
        """
        self._path, self._max_cache_bytes, self._check_characters = path, max_cache_bytes, check_characters
        self._engine: Any = None
        self._reference: Tokenizer | None = None
        self._terms = terms or Terms(*self._open_reference().frame())
        self._doubted = np.zeros(max(self._terms.doubted, default=0) + 2, np.bool_)  # the last is for all ids beyond
        self._doubted[list(self._terms.doubted)] = True
        self._num_characters = 0  # since memory was looked at
        self._num_first = 0  # characters, taken one by one
        self._load()

    @property
    def after(self) -> tuple[int, ...]:
        """The ids that are put after each text."""
        return self._terms.after

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        """Return the ids of each text; TextFault if both the engine and the reference give up on one."""
        texts = list(texts)
        self._num_characters += sum(map(len, texts))
        if self._num_characters > self._check_characters:
            self._num_characters = 0
            if resident_bytes() > self._limit_bytes:
                self._load()
        try:
            encoded = self._run(texts)
        except BaseException as error:
            if not gave_up(error):
                raise
            return self._join([self._encode(number, text) for number, text in enumerate(texts)])
        doubted = self._numbers_of_doubted(texts, encoded)
        if not doubted:
            return encoded.framed(self._terms.before, self._terms.after)
        return self._join([self._encode(n, texts[n]) if n in doubted else (ids, True) for n, ids in enumerate(encoded)])

    def _join(self, documents: list[tuple[Ids, bool]]) -> Encoded:
        """Return all documents' ids, framed, from each one's bare ids and whether they are the engine's."""
        encoded = Encoded.of([ids for ids, _ in documents], sum(not is_engines for _, is_engines in documents))
        return encoded.framed(self._terms.before, self._terms.after)

    def _run(self, texts: list[str]) -> Encoded:
        """Return what the engine makes of texts, without a frame."""
        size = sum(map(len, texts))
        are_short = size < _SHORT_CHARACTERS * len(texts)
        if not are_short or not self._engine.takes_batches or self._num_first < FIRST_CHARACTERS:
            self._num_first += size
            return Encoded.of([self._engine.encode(text) for text in texts])
        if len(texts) * max(map(len, texts)) > _MAX_PADDING * size + _FREE_PADDING:
            half = len(texts) // 2
            first, second = self._run(texts[:half]), self._run(texts[half:])
            return Encoded(
                np.concatenate([first.tokens, second.tokens]), np.concatenate([first.lengths, second.lengths])
            )
        rows, lengths = self._engine.encode_rows(texts)
        return Encoded(rows[np.arange(rows.shape[1]) < lengths[:, None]], lengths)

    def _numbers_of_doubted(self, texts: list[str], encoded: Encoded) -> set[int]:
        """Return which documents the reference has to see."""
        doubted = self._numbers_of_wrong(texts, encoded)
        if has_drift("".join(texts)):
            doubted.update(number for number, text in enumerate(texts) if has_drift(text))
        return doubted

    def _numbers_of_wrong(self, texts: list[str], encoded: Encoded) -> set[int]:
        """Return which documents hold what the terms name."""
        wrong = set(encoded.holding(self._doubted).tolist()) if self._terms.doubted else set[int]()
        if characters := self._terms.characters:
            wrong.update(n for n, text in enumerate(texts) if any(character in text for character in characters))
        return wrong

    def _encode(self, number: int, text: str) -> tuple[Ids, bool]:
        """Return the bare ids of one text, the reference's where they are doubted or the engine fails; and which."""
        try:
            whole: Ids = self._engine.encode(text)
            if not self._numbers_of_wrong([text], Encoded.of([whole])):
                if not has_drift(text):
                    return whole, True
                ids = self._encode_lines(text, whole)
                if ids is not None:
                    return ids, False
        except BaseException as error:
            if not gave_up(error):
                raise
            self._load()
        try:
            return self._encode_surely(text), False
        except TextFault as fault:
            fault.number = number
            raise

    def _encode_lines(self, text: str, whole: Ids) -> Ids | None:
        """Return the ids of a text with drift, only of its drifting lines by the slow reference; None if lines
        depend on each other: the engine's ids of the whole text must be those of the lines.
        """
        for cut in _CUTS:
            lines = cut.split(text)
            ids: list[Ids] = [self._engine.encode(line) for line in lines]
            if len(lines) > 1 and np.array_equal(np.concatenate(ids), whole):
                break
        else:
            return None
        try:
            return np.concatenate(
                [self._encode_surely(line) if has_drift(line) else fast for line, fast in zip(lines, ids)]
            )
        except TextFault:
            return None

    def _encode_surely(self, text: str) -> Ids:
        """Return the reference's ids of a text, without the frame."""
        [ids] = self._open_reference().encode_batch([text])
        return ids[len(self._terms.before) : len(ids) - len(self._terms.after)]

    def _open_reference(self) -> Tokenizer:
        if self._reference is None:
            self._reference = open_tokenizer(self._path)
        return self._reference

    def _load(self) -> None:
        self._engine = None  # its cache goes before the new one comes
        self._engine = _open_engine(self._path)
        self._limit_bytes = resident_bytes() + self._max_cache_bytes


class _Engine:
    """A loaded gigatoken."""

    def __init__(self, library: Any, first_id: int = 0) -> None:
        from gigatoken.gigatoken_rs import BPETokenizer

        self._library, self._first_id = library, first_id
        self.takes_batches = isinstance(
            library.backend, BPETokenizer
        )  # for the other, a batch is slower than its texts

    def encode(self, text: str) -> Ids:
        """Return the ids of one text."""
        ids: Ids = self._library.backend.encode(text)
        return ids + np.uint32(self._first_id) if self._first_id else ids

    def encode_rows(self, texts: list[str]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """Return a row of ids for each text, padded to the longest, and how many ids each has; on this thread."""
        rows, lengths = self._library.encode_batch_padded(texts, 0, parallel=False)
        return rows + np.uint32(self._first_id) if self._first_id else rows, lengths


def _open_engine(path: Path) -> _Engine:
    from gigatoken import Tokenizer as Library

    content = path.read_bytes()
    if is_tekken(path, content):
        return _open_tekken(Library, read_tekken(path, content))
    if path.suffix == ".json":
        return _Engine(Library.from_json(content))
    if not is_rank_file(path, content):
        return _Engine(Library.from_sentencepiece(content))
    encoding = read_rank_file(path, content).encoding
    return _Engine(Library.from_tiktoken(path, _splitter(encoding.pattern), encoding.special_tokens))


def _open_tekken(library: Any, file: RankFile) -> _Engine:
    """Return the engine over ranks that it takes as a file of its own form, from 0."""
    splitter = _splitter(file.encoding.pattern)
    with tempfile.NamedTemporaryFile(suffix=".tiktoken") as lines:
        lines.writelines(base64.b64encode(token) + b" %d\n" % (id - file.first_id) for token, id in file.ranks.items())
        lines.flush()
        return _Engine(library.from_tiktoken(lines.name, splitter, {}), file.first_id)


def _splitter(pattern: str) -> str:
    if pattern not in SPLITTERS:
        raise ValueError(f"it does not split text by the pattern {pattern!r}")
    return SPLITTERS[pattern]


def resident_bytes() -> int:
    """Return the memory that this process has resident."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


_NUM_CODES, _LOOKED_UP = 0x110000, ((0, 0x20000), (0xE0000, 0xE1000))
_IDEOGRAPHS = (
    "20000-2a6df 2a700-2b738 2b740-2b81d 2b820-2cea1 2ceb0-2ebe0 2f800-2fa1d 30000-3134a"  # assigned by Unicode 14
)
_PIECE_CHARACTERS = 1 << 12
# New since Unicode 10 and a mark with a class, or new since Unicode 16 and a letter, mark or number.
_NEWER = (
    "7fd 88f 897-89f 8ca-8d3 9fe c3c c5c cdc d3b-d3c eba 1715 1abf-1add 1ae0-1aeb 1df6-1dfa a7ce-a7cf a7d2 a7d4 a7f1 "
    "a82c 10940-10959 10d24-10d27 10d69-10d6d 10eab-10eac 10ec5-10ec7 10efa-10eff 10f46-10f50 10f82-10f85 11070 "
    "1133b 113ce-113d0 1145e 11839-1183a 11938 1193d-1193e 11943 119e0 11a34 11a47 11a99 11b60-11b67 11d42-11d45 "
    "11d97 11db0-11ddb 11de0-11de9 11f41-11f42 1612f 16ea0-16ed3 16ff0-16ff6 187f8-187ff 18d09-18d1e 18d80-18df2 1e08f "
    "1e130-1e136 1e2ae 1e2ec-1e2ef 1e4ec-1e4ef 1e5ee-1e5ef 1e6c0-1e6ff 2b73a-2b73f 2cea2-2cead 323b0-33479"
)


def has_drift(text: str) -> bool:
    """Return whether a text holds such a character, or one that is assigned in no Unicode that Python knows."""
    if text.isascii():
        return False
    table = _table()
    for start in range(0, len(text), _PIECE_CHARACTERS):
        piece = text[start : start + _PIECE_CHARACTERS]
        if not piece.isascii() and table[np.frombuffer(piece.encode("utf-32-le", "surrogatepass"), "<u4")].any():
            return True
    return False


@cache
def _table() -> npt.NDArray[np.bool_]:
    """Return for every code point whether it drifts; 1 MiB, made in some 10 ms."""
    table = np.ones(_NUM_CODES, np.bool_)
    for start, stop in _LOOKED_UP:
        table[start:stop] = [unicodedata.category(chr(code)) == "Cn" for code in range(start, stop)]
    table[0xF0000:] = False  # for private use
    for entries, drifts in ((_IDEOGRAPHS, False), (_NEWER, True)):
        for entry in entries.split():
            first, _, last = entry.partition("-")
            table[int(first, 16) : int(last or first, 16) + 1] = drifts
    return table
