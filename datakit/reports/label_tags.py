"""LabelTags: which tag each label of a stream's samples has, so that losses can be summed by tag.

A label is the token that is predicted, and has the tag of the document that holds it: the last token of a document
predicts the first of the next one. Rows of stores without tags cost nothing, others the pages of indices and origins
that hold their documents.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from datakit.format.shard import Int64s
from datakit.order.blend import Blend
from datakit.reports.provenance import Passages, blame
from datakit.store.token_store import TokenStore


class LabelTags:
    """The tags of a blend's stores, in the order of the stores and of their settings, and behind them None.

    `names` has each once; labels of documents without a tag have None.
    """

    def __init__(self, blend: Blend) -> None:
        """Read which tags there are; CheckFailed if a manifest's are malformed."""
        self._blend = blend
        named = dict.fromkeys(name for store in blend.stores for name in store.tags.names)
        self.names: tuple[str | None, ...] = (*named, None)
        self._numbers = {name: number for number, name in enumerate(self.names)}

    def __bool__(self) -> bool:
        return len(self.names) > 1

    def of(self, samples: npt.ArrayLike) -> Int64s:
        """Return the number in `names` of each label's tag, [samples, seq_length], of samples whose rows have one
        length; that of padding is any.
        """
        asked, places = np.unique(np.array(samples, ndmin=1), return_inverse=True)
        sources, starts = self._blend.addresses(asked)
        length = self._blend.sources.seq_lengths[sources[0]]
        numbers = np.full((len(asked), length), self._numbers[None], np.int64)
        tagged = np.array([bool(self._blend.stores[source].tags) for source in sources.tolist()])
        if tagged.any():
            passages = blame(self._blend, asked[tagged])
            tags = np.array([self._numbers[tag] for tag in self._tags(passages)], np.int64)
            sizes, ends = passages.stops - passages.starts, np.searchsorted(passages.samples, asked[tagged], "right")
            begins = np.searchsorted(passages.samples, asked[tagged])
            for row, begin, end in zip(np.flatnonzero(tagged).tolist(), begins.tolist(), ends.tolist()):
                store, place = self._blend.stores[sources[row]], int(starts[row]) // length
                own = _of_labels(store, place, length, tags[begin:end], sizes[begin:end])
                numbers[row, : len(own)] = own
        return numbers[places.ravel()]

    def _tags(self, passages: Passages) -> Iterator[str | None]:
        """Yield the tag of each passage's document."""
        known: dict[tuple[int, int, str], str | None] = {}
        rows = zip(passages.sources.tolist(), passages.documents.tolist(), passages.origins(self._blend), strict=True)
        for source, document, origin in rows:
            store = self._blend.stores[source]
            key = source, store.shard_of(document), origin.path
            if key not in known:
                known[key] = store.tags.of(*key[1:])
            yield known[key]


def _of_labels(store: TokenStore, row: int, length: int, tags: Int64s, sizes: Int64s) -> Int64s:
    """Return the tags of a row's labels, from those of its passages and how many tokens these have.

    A row of 4 tokens reads 5: of passages of 2 and 3 tokens, with tags 7 and 8, the labels have 7, 8, 8, 8. Each piece
    of a packed row is one passage, in which tokens and labels are of one document.
    """
    if store.packing == "concat":
        return np.repeat(tags, sizes)[1:]
    return np.repeat(tags, [piece.size for piece in store.rows.pieces(row, length)])
