"""Difference: the first document in which two stores differ, whatever their shards' cut and their tokens' dtype.

Lengths are compared by windows of the index, tokens by windows of a MiB: one sequential read of both stores up to the
difference, flat memory. Where documents came from is reported, not compared.
"""

from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from datakit.files.durable import reading
from datakit.format.origins import Origin
from datakit.format.shard import Int64s, ShardIndex, Tokens
from datakit.store.token_store import TokenStore
from threefold.closing import Closing
from threefold.errors import CheckFailed, quoted

WINDOW_DOCUMENTS, WINDOW_TOKENS = 1 << 18, 1 << 19


@dataclass(frozen=True, slots=True)
class Side:
    """What one store has where two differ: the document's length, the token (None past its end) and its source."""

    num_tokens: int
    token: int | None
    origin: Origin


@dataclass(frozen=True, slots=True)
class Difference:
    """The first document that differs, its first token that does, and both sides (None if a store has ended)."""

    document: int
    token: int
    left: Side | None
    right: Side | None


def find_difference(
    left: TokenStore,
    right: TokenStore,
    *,
    window_documents: int = WINDOW_DOCUMENTS,
    window_tokens: int = WINDOW_TOKENS,
) -> Difference | None:
    """Return the first difference of two stores, None if they hold the same documents; memory is the two windows."""
    with _Stream(left, window_documents) as first, _Stream(right, window_documents) as second:
        document = _first_unequal_document(first, second, window_tokens)
    return None if document is None else _describe(left, right, document)


def _first_unequal_document(left: "_Stream", right: "_Stream", window_tokens: int) -> int | None:
    num_documents = min(left.store.num_documents, right.store.num_documents)
    document = token = 0
    while document < num_documents:
        lengths, others = left.lengths(document, token), right.lengths(document, token)
        count = min(len(lengths), len(others))
        unequal = np.flatnonzero(lengths[:count] != others[:count])
        num_same = int(unequal[0]) if len(unequal) else count
        ends = token + np.cumsum(lengths[:num_same])
        stop = int(ends[-1]) if num_same else token
        for start in range(token, stop, window_tokens):
            at = _first_unequal_token(left, right, start, min(start + window_tokens, stop))
            if at is not None:
                return document + int(np.searchsorted(ends, at, side="right"))
        if num_same < count:
            return document + num_same
        document, token = document + count, stop
    return None if left.store.num_documents == right.store.num_documents else num_documents


def _first_unequal_token(left: "_Stream", right: "_Stream", start: int, stop: int) -> int | None:
    """Return the address of the first token in [start, stop) that differs, None if none does."""
    first, second = left.tokens(start, stop), right.tokens(start, stop)
    unequal = first != second
    return start + int(np.argmax(unequal)) if unequal.any() else None


def _describe(left: TokenStore, right: TokenStore, document: int) -> Difference:
    stores, none = (left, right), np.empty(0, np.int64)
    has_ended = [document >= store.num_documents for store in stores]
    first, second = (none if ended else store.document(document) for ended, store in zip(has_ended, stores))
    shorter = min(len(first), len(second))
    unequal = np.flatnonzero(first[:shorter] != second[:shorter])
    token = int(unequal[0]) if len(unequal) else shorter
    sides = [
        None
        if ended
        else Side(len(tokens), int(tokens[token]) if token < len(tokens) else None, store.origin(document))
        for ended, store, tokens in zip(has_ended, stores, (first, second))
    ]
    return Difference(document, token, *sides)


class _Stream(Closing):
    """One store read front to back: one shard is open at a time, its tokens are read and not mapped."""

    def __init__(self, store: TokenStore, window_documents: int) -> None:
        self.store, self._window_documents = store, window_documents
        self._number = -1
        self._index: ShardIndex
        self._file: BinaryIO | None = None

    def lengths(self, document: int, token: int) -> Int64s:
        """Return the lengths of documents from this one on, which begins at this token.

        A window, or what the shard has.
        """
        number = bisect_right(self.store.document_starts, document) - 1
        if number != self._number:
            self._open(number)
            if token != self.store.token_starts[number]:
                raise self._damaged("the lengths of its documents do not sum to its tokens")
        first = document - self.store.document_starts[number]
        lengths = self._index.lengths[first : first + self._window_documents].astype(np.int64)
        if lengths.min(initial=0) < 0:
            raise self._damaged(f"it has a document of {lengths.min()} tokens")
        return lengths

    def tokens(self, start: int, stop: int) -> Tokens:
        """Return the tokens at addresses [start, stop), which are in the open shard."""
        assert self._file is not None, "lengths opens the shard"
        dtype = self._index.dtype
        with reading(Path(self._file.name)):
            self._file.seek((start - self.store.token_starts[self._number]) * dtype.itemsize)
            tokens: Tokens = np.fromfile(self._file, dtype, stop - start)
        if len(tokens) < stop - start:
            raise self._damaged("its documents reach beyond its tokens")
        return tokens

    def close(self) -> None:
        """Let go of the open shard."""
        if self._file is not None:
            self._file.close()

    def _open(self, number: int) -> None:
        self.close()
        entry = self.store.manifest.shards[number]
        self._number, self._index = number, ShardIndex(self.store.path / f"{entry.name}.idx")
        if self._index.num_sequences != entry.num_documents or self._index.dtype.name != self.store.dtype:
            raise self._damaged(f"it holds {self._index.num_sequences} {self._index.dtype} sequences")
        path = self.store.path / f"{entry.name}.bin"
        with reading(path):
            self._file = path.open("rb", buffering=0)

    def _damaged(self, what: str) -> CheckFailed:
        return CheckFailed(f"{self._index.path} is damaged: {what}", hint=f"datakit verify {quoted(self.store.path)}")
