"""Encoder: the engine that turns documents into ids in bulk, chosen by a proof that its ids are the reference's.

The reference is the library of the tokenizer file's kind. `gigatoken` is a byte-level and sentencepiece BPE engine many
times as fast; it is taken only where it gives the reference's ids on a probe: hostile text of many scripts, every added
token, and documents of the very input. It keeps every distinct word it has met for ever, so it is loaded anew where
its memory has grown. Lines with a character on which the engines' Unicode tables may differ go to the reference.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from datakit.tokenization.doubtful import is_doubtful
from datakit.tokenization.probe import PROBE, texts_of_tokens
from datakit.tokenization.rank_file import (
    CL100K_PATTERN,
    GPT2_PATTERN,
    LLAMA3_PATTERN,
    O200K_PATTERN,
    QWEN_PATTERN,
    R50K_PATTERN,
    TEKKEN_PATTERN,
    is_rank_file,
    read_rank_file,
)
from datakit.tokenization.tokenizer import Ids, TextFault, Tokenizer, gave_up, open_tokenizer
from threefold.errors import UserError

AUTO, FAST = "auto", "gigatoken"
MAX_CACHE_BYTES, CHECK_CHARACTERS = 96 << 20, 4 << 20
# Between lines, where no engine doubts what the characters are: before the newline, or for patterns that put it to the
# punctuation before it, after it.
_CUTS = re.compile(r"(?<=[!-~])(?=\n)"), re.compile(r"(?<=[!-~]\n)(?=[0-9A-Za-z])")

SPLITTERS = {  # gigatoken's, by the pattern of tiktoken that they split as
    GPT2_PATTERN: "gpt2",
    R50K_PATTERN: "gpt2",
    CL100K_PATTERN: "cl100k",
    LLAMA3_PATTERN: "olmo3",
    QWEN_PATTERN: "qwen2",
    O200K_PATTERN: "o200k",
    TEKKEN_PATTERN: "nemotron",
}


class Encoder(Protocol):
    """What turns documents into ids in bulk; every Tokenizer is one."""

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text, on one thread."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend that a run uses, and why."""

    backend: str
    reason: str


def open_encoder(path: str | os.PathLike[str], backend: str) -> Encoder:
    """The encoder of a tokenizer file on a backend that `choose_backend` named."""
    return GigatokenEncoder(Path(path)) if backend == FAST else open_tokenizer(path)


def require_backend(asked: str, path: str, reference: Tokenizer) -> None:
    """UserError where a backend cannot read a tokenizer file for its kind alone."""
    if asked not in (AUTO, FAST, reference.kind):
        raise UserError(f"{path} is read by {reference.kind}, not by {asked}", hint=f"--tokenizer-backend {AUTO}")


def choose_backend(asked: str, path: str, reference: Tokenizer, texts: Sequence[str]) -> Choice:
    """The backend for a tokenizer file: what was asked for, or for "auto" the fastest that passes the probe.

    `texts` are some of the input's own. UserError where the backend that was asked for reads no such file, or fails.
    """
    require_backend(asked, path, reference)
    if asked == reference.kind:
        return Choice(asked, "as asked for")
    probe = [*PROBE, *texts_of_tokens(reference.added_tokens()), *texts]
    fault = probe_fault(path, reference, probe)
    if fault is None:
        size = sum(len(text) for text in texts)
        return Choice(FAST, f"the ids of {reference.kind} on a probe with {size:,} characters of this input")
    if asked == FAST:
        raise UserError(f"{FAST} {fault}", hint=f"--tokenizer-backend {AUTO}")
    return Choice(reference.kind, f"{FAST} {fault}")


def probe_fault(path: str, reference: Tokenizer, texts: Sequence[str]) -> str | None:
    """Why the fast engine cannot stand in for the reference, None where it gives the same ids for all texts."""
    try:
        found = GigatokenEncoder(Path(path)).encode_batch(texts)
    except ImportError:
        return "is not installed: pip install gigatoken"
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the engine is no Exception
        return f"cannot do it: {' '.join(str(error).split())[:200]}"
    try:
        wanted = reference.encode_batch(texts)
    except TextFault as fault:
        return f"cannot be compared: {fault.message}"
    for text, fast, sure in zip(texts, found, wanted, strict=True):
        if not np.array_equal(fast, sure):
            return f"gives other ids than {reference.kind} for {text[:40]!r}"
    return None


class GigatokenEncoder:
    """gigatoken over a file of any kind; its cache is kept below about 96 MiB, and doubtful texts from it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._engine: Any = None
        self._reference: Tokenizer | None = None
        self._num_characters = 0  # since memory was looked at
        self._load()

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        self._num_characters += sum(map(len, texts))
        if self._num_characters > CHECK_CHARACTERS:
            self._num_characters = 0
            if resident_bytes() > self._limit_bytes:
                self._load()
        if not any(map(is_doubtful, texts)):
            try:
                return [self._engine.encode(text) for text in texts]
            except BaseException as error:
                if not gave_up(error):
                    raise
        return [self._encode(number, text) for number, text in enumerate(texts)]

    def _encode(self, number: int, text: str) -> Ids:
        """The ids of one text, the reference's where it is doubtful or the engine gives up on it."""
        try:
            ids: Ids | None = self._encode_lines(text) if is_doubtful(text) else self._engine.encode(text)
            if ids is not None:
                return ids
        except BaseException as error:
            if not gave_up(error):
                raise
            self._load()
        try:
            return self._encode_surely(text)
        except TextFault as fault:
            fault.number = number
            raise

    def _encode_lines(self, text: str) -> Ids | None:
        """The ids of a doubtful text, only of its doubtful lines by the slow reference; None where lines do not stand
        apart, which the engine tells: what it gives for the whole text must be what it gives for the lines."""
        whole = self._engine.encode(text)
        for cut in _CUTS:
            lines = cut.split(text)
            ids = [self._engine.encode(line) for line in lines]
            if len(lines) > 1 and np.array_equal(np.concatenate(ids), whole):
                break
        else:
            return None
        try:
            return np.concatenate(
                [self._encode_surely(line) if is_doubtful(line) else fast for line, fast in zip(lines, ids)]
            )
        except TextFault:
            return None

    def _encode_surely(self, text: str) -> Ids:
        if self._reference is None:
            self._reference = open_tokenizer(self._path)
        return self._reference.encode_batch([text])[0]

    def _load(self) -> None:
        self._engine = None  # its cache goes before the new one comes
        self._engine = _open_engine(self._path)
        self._limit_bytes = resident_bytes() + MAX_CACHE_BYTES


def _open_engine(path: Path) -> Any:
    from gigatoken import Tokenizer as Library

    content = path.read_bytes()
    if path.suffix == ".json":
        return Library.from_json(content)
    if not is_rank_file(path, content):
        return Library.from_sentencepiece(content)
    encoding = read_rank_file(path, content).encoding
    if encoding.pattern not in SPLITTERS:
        raise ValueError(f"it does not split text by the pattern {encoding.pattern!r}")
    return Library.from_tiktoken(path, SPLITTERS[encoding.pattern], encoding.special_tokens)


def resident_bytes() -> int:
    """The memory that this process has resident."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
