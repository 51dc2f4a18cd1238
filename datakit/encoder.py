"""Encoder: the engine that turns documents into ids in bulk, chosen by a proof that its ids are the reference's.

The reference is the library of the tokenizer file's kind. `gigatoken` is a byte-level and sentencepiece BPE engine many
times as fast; it is taken only where it gives the reference's ids on a probe: hostile text of many scripts, every added
token, and documents of the very input. It keeps every distinct word it has met for ever, so it is loaded anew where
its memory has grown.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from datakit.tokenizer import Ids, Tokenizer, open_tokenizer
from threefold.errors import UserError

AUTO, FAST = "auto", "gigatoken"
MAX_CACHE_BYTES, CHECK_CHARACTERS = 96 << 20, 4 << 20

PROBE = (
    "", " ", "\n", "\t \n\n  x", "  two  spaces   three ", "a\r\nb\r\r\n", "trailing \n ", "\x00\x01\x7f", "x" * 3000,
    "The quick brown fox doesn't jump; they'LL say it's 1234567890.50 (e.g. $3,000)!", "def f(x):\n    return x**2",
    "ÀÉÎõü ﬁ ſ ß İ ı e\u0301 \u0301 Å", "Καλημέρα κόσμε", "Съешь же ещё этих мягких булок", "שלום עולם",
    "مرحبا بالعالم ١٢٣", "नमस्ते दुनिया", "வணக்கம்", "สวัสดีชาวโลก", "你好，世界。漢字", "こんにちは世界ﾊﾝｶｸ", "안녕하세요",
    "ጤና ይስጥልኝ", "გამარჯობა", "👩‍👩‍👧‍👦 🇩🇪 👍🏽 \U0001f9ff", "𝕳𝖊𝖑𝖑𝖔 𐍈 \U0010ffff",
    "\u200b\u200d\ufeff\u2028\u00a0\u3000", "½ ² Ⅷ ①", "https://example.org/a?b=c&d=%20#e",
    "<s> </s> <unk> <|endoftext|> [INST] <0x0A> ▁ Ġ", "----====____////\\\\\\\\",
)  # fmt: skip


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


def choose_backend(asked: str, path: str, reference: Tokenizer, texts: Sequence[str]) -> Choice:
    """The backend for a tokenizer file: what was asked for, or for "auto" the fastest that passes the probe.

    `texts` are some of the input's own. UserError where the backend that was asked for reads no such file, or fails.
    """
    if asked == reference.kind:
        return Choice(asked, "as asked for")
    if asked not in (AUTO, FAST):
        raise UserError(f"{path} is read by {reference.kind}, not by {asked}", hint=f"--tokenizer-backend {AUTO}")
    probe = [*PROBE, *(f"a{token} {token}b" for token in reference.added_tokens()), *texts]
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
    for text, fast, sure in zip(texts, found, reference.encode_batch(texts), strict=True):
        if not np.array_equal(fast, sure):
            return f"gives other ids than {reference.kind} for {text[:40]!r}"
    return None


class GigatokenEncoder:
    """gigatoken over a `tokenizer.json` or a sentencepiece `.model`; its cache is kept below about 96 MiB."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._engine: Any = None
        self._num_characters = 0  # since memory was looked at
        self._load()

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        self._num_characters += sum(map(len, texts))
        if self._num_characters > CHECK_CHARACTERS:
            self._num_characters = 0
            if resident_bytes() > self._limit_bytes:
                self._load()
        encode = self._engine.encode
        return [encode(text) for text in texts]

    def _load(self) -> None:
        from gigatoken import Tokenizer as Library

        self._engine = None  # its cache goes before the new one comes
        content = self._path.read_bytes()
        is_json = self._path.suffix == ".json"
        self._engine = Library.from_json(content) if is_json else Library.from_sentencepiece(content)
        self._limit_bytes = resident_bytes() + MAX_CACHE_BYTES


def resident_bytes() -> int:
    """The memory that this process has resident."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
