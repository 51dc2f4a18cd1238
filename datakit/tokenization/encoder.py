"""Encoder: what turns documents into ids in bulk, chosen by a proof that its ids are the reference's.

The reference is the library of the tokenizer file's kind. `gigatoken` is a byte-level and sentencepiece BPE engine many
times as fast. A probe finds when it may replace the reference: texts of many scripts, all added tokens, documents of
the very input. Where its ids differ, but only for texts that show it by a token or a character, such documents go to
the reference one by one; where they differ otherwise, all do.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from datakit.tokenization.encoded import Encoded, Ids
from datakit.tokenization.fast_encoder import NO_TERMS, GigatokenEncoder, Terms
from datakit.tokenization.probe import PROBE, texts_of_tokens
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
