"""Excerpt: one document or one sample of a store with where each of its tokens came from, as ids and as text.

Costs the pages that hold its tokens and origins, whatever the store's size.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from datakit.format.origins import Origin
from datakit.format.shard import Tokens
from datakit.store.token_store import TokenStore
from datakit.tokenization.tokenizer import Tokenizer, open_tokenizer
from threefold.errors import UserError, quoted

_MAX_SPLIT_TOKENS = 8  # tokens that one character may be split over
_REPLACEMENT = "\ufffd"  # what decoders make of bytes that are no whole character


@dataclass(frozen=True, slots=True)
class Part:
    """The tokens [start, start + num_tokens) of one document, where that document came from, and the tag it has."""

    document: int
    start: int
    num_tokens: int
    origin: Origin
    tag: str | None


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Tokens of a store and the documents they are of; the first is at the address `first_token`.

    They follow each other there, but for those of a packed row, whose documents are in any places.
    """

    first_token: int
    tokens: Tokens
    parts: tuple[Part, ...]

    def part_tokens(self) -> Iterator[tuple[Part, Tokens]]:
        """Yield each part with its tokens."""
        at = 0
        for part in self.parts:
            yield part, self.tokens[at : at + part.num_tokens]
            at += part.num_tokens


def document_excerpt(store: TokenStore, number: int) -> Excerpt:
    """Return one document; UserError if the store has none of this number."""
    if not 0 <= number < store.num_documents:
        raise UserError(
            f"there is no document {number}: {store.place} has {store.num_documents} documents, counted from 0",
            hint=f"datakit inspect {quoted(store.place)} --document {max(store.num_documents - 1, 0)}",
        )
    tokens = store.document(number)
    return Excerpt(store.first_token(number), tokens, (_part(store, number, 0, len(tokens)),))


def sample_excerpt(store: TokenStore, number: int, seq_length: int) -> Excerpt:
    """Return one sample in the store's own order, of a packed store one row of its index.

    The label of its last token is the last one here. UserError if there is none of this number.
    """
    if seq_length < 1:
        raise UserError(f"a sequence length of {seq_length} tokens: at least 1 is needed", hint="--seq-length 4096")
    num_samples = store.num_rows(seq_length)
    if not 0 <= number < num_samples:
        raise UserError(
            f"there is no sample {number}: {store.place} has {num_samples} samples of {seq_length} tokens, "
            "counted from 0",
            hint=f"datakit inspect {quoted(store.place)} --sample {max(num_samples - 1, 0)} --seq-length {seq_length}"
            + (f" --packing {store.packing}" if store.packing != "concat" else ""),
        )
    spans = store.row_spans(number, seq_length)
    tokens = np.concatenate([store.tokens(start, stop) for start, stop in spans])
    return Excerpt(spans[0][0], tokens, tuple(part for start, stop in spans for part in _parts(store, start, stop)))


def open_matching_tokenizer(store: TokenStore, path: str | None, *, is_any: bool = False) -> Tokenizer | None:
    """Return the tokenizer of a file, UserError if it is not the one that made the store, unless it may be any.

    Without a file it is the store's own copy, None if it keeps none.
    """
    if path is None:
        return store.open_tokenizer()
    tokenizer, made_with = open_tokenizer(path), store.manifest.tokenizer
    if tokenizer.fingerprint != made_with.fingerprint and not is_any:
        recorded = f"one of fingerprint {made_with.fingerprint}" if made_with.fingerprint else "one that is not known"
        raise UserError(
            f"{path} has fingerprint {tokenizer.fingerprint}, {store.place} was made with {recorded}",
            hint="leave --tokenizer out: the store keeps its own"
            if store.manifest.tokenizer_files
            else f"datakit inspect {quoted(store.place)}; --any-tokenizer reads it so all the same",
        )
    return tokenizer


def pieces(tokenizer: Tokenizer, ids: Tokens) -> list[str]:
    """Return the text of each token, so that all of them joined are the text of all.

    A character that is split over several tokens is at the last of them. If a decoder's text cannot be parted by token
    it is one piece.
    """
    texts: list[str] = []
    before = start = 0  # ids[before:start] are the tokens of the last piece: a decoder may need them to place a space
    for stop in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[before:stop])
        is_split = text.endswith(_REPLACEMENT) and stop - start < _MAX_SPLIT_TOKENS and stop < len(ids)
        if not is_split:
            texts.append(text[len(tokenizer.decode(ids[before:start])) :])
            before, start = start, stop
    whole = tokenizer.decode(ids)
    return texts if "".join(texts) == whole else [whole]


def _parts(store: TokenStore, start: int, stop: int) -> Iterator[Part]:
    at = start
    while at < stop:
        document = store.document_at(at)
        first = store.first_token(document)
        end = min(stop, first + len(store.document(document)))
        yield _part(store, document, at - first, end - at)
        at = end


def _part(store: TokenStore, document: int, start: int, num_tokens: int) -> Part:
    return Part(document, start, num_tokens, store.origin(document), store.tag(document))
