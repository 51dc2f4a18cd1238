"""Encoded: the ids of many documents in one array, as they leave an engine and go into a shard."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.integer[Any]]
_LONG_TOKENS = 256


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """The ids of documents one after the other, and how many each has; iterates over the ids of each document.

    `num_by_reference` documents of them were encoded by the reference in place of the engine that was asked.
    """

    tokens: Ids
    lengths: npt.NDArray[np.int64]
    num_by_reference: int = 0

    @classmethod
    def of(cls, documents: Sequence[Ids], num_by_reference: int = 0) -> "Encoded":
        """Join the ids of single documents."""
        lengths = np.fromiter(map(len, documents), np.int64, len(documents))
        tokens: Ids = np.concatenate([np.empty(0, np.uint32), *documents], dtype=np.uint32, casting="unsafe")
        return cls(tokens, lengths, num_by_reference)

    def framed(self, before: Sequence[int], after: Sequence[int]) -> "Encoded":
        """Return the documents with these ids before and after each one."""
        if not len(before) and not len(after):
            return self
        lengths = self.lengths + len(before) + len(after)
        if len(self.tokens) > _LONG_TOKENS * len(
            self
        ):  # few pieces are copied faster than a flag for each token is read
            head, tail = np.array(before, self.tokens.dtype), np.array(after, self.tokens.dtype)
            pieces = [piece for ids in self for piece in (head, ids, tail)]
            return Encoded(np.concatenate(pieces), lengths, self.num_by_reference)
        ends = np.cumsum(lengths)
        tokens = np.empty(int(lengths.sum()), self.tokens.dtype)
        own = np.ones(len(tokens), np.bool_)
        places = [(ends - lengths + place, id) for place, id in enumerate(before)]
        places += [(ends - len(after) + place, id) for place, id in enumerate(after)]
        for place, id in places:
            tokens[place], own[place] = id, False
        tokens[own] = self.tokens
        return Encoded(tokens, lengths, self.num_by_reference)

    def where(self, chosen: npt.NDArray[np.bool_]) -> "Encoded":
        """Return the documents that are chosen, of a flag for each."""
        return Encoded(self.tokens[np.repeat(chosen, self.lengths)], self.lengths[chosen])

    def holding(self, ids: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """Return the numbers of the documents with an id that a table of flags names."""
        places = np.flatnonzero(ids[np.minimum(self.tokens, len(ids) - 1)])
        return np.unique(np.searchsorted(np.cumsum(self.lengths), places, side="right"))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> Ids:
        end = int(self.lengths[: number + 1].sum())
        return self.tokens[end - int(self.lengths[number]) : end]

    def __iter__(self) -> Iterator[Ids]:
        start = 0
        for end in np.cumsum(self.lengths).tolist():
            yield self.tokens[start:end]
            start = end
