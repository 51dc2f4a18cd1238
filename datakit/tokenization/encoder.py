"""Encoder: what turns documents into ids in bulk, chosen by a proof that its ids are the reference's.

The reference is the library of the tokenizer file's kind. `gigatoken` is a byte-level and sentencepiece BPE engine many
times as fast. A probe finds when it may replace the reference: texts of many scripts, all added tokens, documents of
the very input. Where its ids differ, but only for texts that show it by a token or a character, such documents go to
the reference one by one; where they differ otherwise, all do.

The texts of a probe are hostile ones of many scripts, and each added token in all the places where libraries differ
about it.
"""

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Protocol
from unicodedata import normalize

import numpy as np

from datakit.tokenization.encoded import Encoded, Ids
from datakit.tokenization.fast_encoder import NO_TERMS, GigatokenEncoder, Terms
from datakit.tokenization.tokenizer import TextFault, Tokenizer, open_tokenizer, tokenizer_path
from threefold.errors import UserError
from threefold.installing import install

AUTO, FAST = "auto", "gigatoken"
_MAX_SHOWN = 3
SPACE = "▁"  # what sentencepiece writes for a blank; user-defined pieces of it are found in text otherwise


class Encoder(Protocol):
    """What turns documents into ids in bulk; `after` are the ids that are put after each text."""

    @property
    def after(self) -> tuple[int, ...]:
        """Return the ids that are put after each text."""

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        """Return the ids of each text, on one thread."""


class ReferenceEncoder:
    """The reference library itself."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.after = tokenizer.frame()[1]

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        """Return the ids of each text; TextFault names one on which the library fails."""
        return Encoded.of(self._tokenizer.encode_batch(texts), len(texts))


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend that a run uses, why, and the terms on which the fast engine may."""

    backend: str
    reason: str
    terms: Terms = NO_TERMS


class Unfit(Exception):
    """Why the fast engine cannot replace the reference."""


def open_encoder(path: str | os.PathLike[str], backend: str, terms: Terms | None = None) -> Encoder:
    """Open the encoder of a tokenizer file on a backend that `choose_backend` chose, and on its terms."""
    if backend == FAST:
        return GigatokenEncoder(tokenizer_path(path), terms)
    return ReferenceEncoder(open_tokenizer(path))


def require_backend(asked: str, path: str, reference: Tokenizer) -> None:
    """Raise UserError if a backend cannot read a tokenizer file for its kind alone."""
    if asked not in (AUTO, FAST, reference.kind):
        raise UserError(f"{path} is read by {reference.kind}, not by {asked}", hint=f"--tokenizer-backend {AUTO}")


def choose_backend(asked: str, path: str, reference: Tokenizer, texts: Sequence[str]) -> Choice:
    """Return the backend for a tokenizer file: what was asked for, or for "auto" the fastest that passes the probe.

    `texts` are some of the input's own. UserError if the backend that was asked for reads no such file, or fails.
    """
    require_backend(asked, path, reference)
    if asked == reference.kind:
        return Choice(asked, "as asked for")
    probe = [*PROBE, *texts_of_tokens(reference.added_tokens()), *texts]
    try:
        terms = find_terms(path, reference, probe)
    except ImportError:
        if asked == FAST:
            raise UserError(f"{FAST} is not installed", hint=install(FAST, "fast")) from None
        return Choice(
            reference.kind, f"{FAST} is not installed; {install(FAST, 'fast')} makes this some ten times as fast"
        )
    except Unfit as fault:
        if asked == FAST:
            raise UserError(f"{FAST} {fault}", hint=f"--tokenizer-backend {AUTO}") from None
        return Choice(reference.kind, f"{FAST} {fault}")
    probed = f"a probe with {sum(map(len, texts)):,} characters of this input"
    return Choice(FAST, f"the ids of {reference.kind} on {probed}{_exceptions(terms, reference)}", terms)


def find_terms(path: str, reference: Tokenizer, texts: Sequence[str]) -> Terms:
    """Return the terms on which the fast engine has the reference's ids for all texts; Unfit if there are none."""
    before, after = reference.frame()
    encoder = _open_fast(path, Terms(before, after))
    added = {number for token in reference.added_tokens() if (number := reference.token_id(token)) is not None}
    doubted, characters, differing = set[int](), tuple[str, ...](), list[tuple[str, set[int]]]()
    for text, fast, sure in zip(texts, _encode_each(encoder, texts), _encode_each(reference, texts), strict=True):
        if fast is None or (sure is not None and np.array_equal(fast, sure)):
            continue  # where the engine fails the reference has it
        differing.append((text, added.intersection(fast[len(before) : len(fast) - len(after)].tolist())))
    for only_one in (True, False):  # a token that explains a text by itself is not doubted for its neighbours
        for _, tokens in differing:
            if not tokens & doubted and (len(tokens) == 1 or not only_one):
                doubted |= tokens
    for text, tokens in differing:
        if not tokens & doubted:
            if SPACE not in text:
                raise Unfit(f"makes other ids than {reference.kind} for {text[:40]!r}")
            characters = (SPACE,)
    return Terms(before, after, tuple(sorted(doubted)), characters)


def _open_fast(path: str, terms: Terms) -> GigatokenEncoder:
    try:
        return GigatokenEncoder(tokenizer_path(path), terms)
    except (KeyboardInterrupt, SystemExit, ImportError):
        raise
    except BaseException as error:  # a panic of the engine is not an Exception
        raise Unfit(f"cannot do it: {' '.join(str(error).split())[:200]}") from None


def _encode_each(encoder: Encoder | Tokenizer, texts: Sequence[str]) -> list[Ids | None]:
    """Return the ids of each text, None if the encoder fails on one."""
    try:
        return list(encoder.encode_batch(texts))
    except TextFault:
        if len(texts) == 1:
            return [None]
        half = len(texts) // 2
        return [*_encode_each(encoder, texts[:half]), *_encode_each(encoder, texts[half:])]


def _exceptions(terms: Terms, reference: Tokenizer) -> str:
    """Return what is said of the documents that the reference will have."""
    if not terms.doubted and not terms.characters:
        return ""
    names = [token for token in reference.added_tokens() if reference.token_id(token) in terms.doubted]
    shown = [repr(name) for name in [*names, *terms.characters]]
    more = f" and {len(shown) - _MAX_SHOWN} more" if len(shown) > _MAX_SHOWN else ""
    return f"; documents with {', '.join(shown[:_MAX_SHOWN])}{more} go to {reference.kind}"


_MAX_TOKENS_EVERYWHERE = 2_000
_MAX_OVERLAPS, _MAX_OVERLAP_CHARACTERS = 10_000, 64

PROBE = (
    "", " ", "\n", "\t \n\n  x", "  two  spaces   three ", "a\r\nb\r\r\n", "trailing \n ", "\x00\x01\x7f", "x" * 3000,
    "\n\t", "a\n  ", "\n\n   \n\n ", "a \u3000", "\x0b\x0c\x85\u1680", " \u00a0 x", "١٢٣٤५६७८𝟙𝟚𝟛",
    "'ſ 'LL 'Ve ’s ''s", "ǅǆ ʰª", "ǆ\u034f ½\u200d½\u20e3 \u00a0\u093e",
    "The quick brown fox doesn't jump; they'LL say it's 1234567890.50 (e.g. $3,000)!", "def f(x):\n    return x**2",
    "ÀÉÎõü ﬁ ſ ß İ ı e\u0301 \u0301 Å", "Καλημέρα κόσμε", "Съешь же ещё этих мягких булок", "שלום עולם",
    "مرحبا بالعالم ١٢٣", "नमस्ते दुनिया", "வணக்கம்", "สวัสดีชาวโลก", "你好，世界。漢字", "こんにちは世界ﾊﾝｶｸ", "안녕하세요",
    "ጤና ይስጥልኝ", "გამარჯობა", "👩‍👩‍👧‍👦 🇩🇪 👍🏽 \U0001f9ff", "𝕳𝖊𝖑𝖑𝖔 𐍈 \U0010fffd",
    "\u200b\u200d\ufeff\u2028\u00a0\u3000", "½ ² Ⅷ ①", "https://example.org/a?b=c&d=%20#e",
    "<s> </s> <unk> <|endoftext|> [INST] <0x0A> ▁ Ġ", " ▁▁", "▁▁ a▁ ▁b", "----====____////\\\\\\\\",
)  # fmt: skip


def texts_of_tokens(tokens: Sequence[str]) -> Iterator[str]:
    """Yield each token by itself, beside text, space and marks, in other letters and cut in two; and where two overlap.

    Of more than some thousand tokens, the later ones are only put beside text and space.
    """
    yield from (f"a{token} {token}b" for token in tokens[_MAX_TOKENS_EVERYWHERE:])
    for token in tokens[:_MAX_TOKENS_EVERYWHERE]:
        half, composed, decomposed = len(token) // 2, normalize("NFC", token), normalize("NFD", token)
        yield from (
            token, f"a{token} {token}b", f"  {token}  ", f"{token * 2} 1{token}1", f"\n{token}\n\té{token}é",
            f".{token}.", token.upper(), token.lower(), token[:half],
            f"{token[:half]}{token}{token[half:]}", f"{token}\u0301", f"{token} {token}", f"{token}\n{token}",
            f"{composed} {decomposed} {composed}",
        )  # fmt: skip
    yield from (f"{token} {other}{token}" for token, other in pairwise(tokens))
    yield from islice(_overlaps(tokens), _MAX_OVERLAPS)


def _overlaps(tokens: Sequence[str]) -> Iterator[str]:
    """Two tokens where the end of one is the begin of the other, or where both may take the white space between."""
    beginning = defaultdict[str, list[str]](list)
    for token in tokens:
        for size in range(1, min(len(token), _MAX_OVERLAP_CHARACTERS) + 1):
            beginning[token[:size]].append(token)
    for token in tokens:
        for start in range(max(1, len(token) - _MAX_OVERLAP_CHARACTERS), len(token)):
            for other in beginning.get(token[start:], ()):
                yield token + other[len(token) - start :]
    for spaced in tokens:
        if spaced.strip() != spaced:
            for token in tokens:
                yield f"{token}{spaced}{token}"
