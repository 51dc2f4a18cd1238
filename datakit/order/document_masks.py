"""DocumentMasks: single documents whose loss is masked, from a sample on; found in a batch by their addresses.

A position is masked if its label, the token it is to predict, is of such a document. With rows of 8 tokens, document
[10, 13) of its store and the row that begins at token 8, labels are tokens 9 to 16: positions 1, 2 and 3 are masked.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import orjson
import xxhash

from datakit.format.shard import Int64s
from datakit.order.mixture import Segment
from datakit.order.sources import Sources
from datakit.store.token_store import TokenStore
from threefold.errors import UserError, quoted

Documents = tuple[tuple[int, int], ...]  # the number of a store as the blend took it, and that of a document


class DocumentMasks:
    """The masked documents of each segment of a blend."""

    def __init__(self, stores: Sequence[TokenStore], segments: Sequence[Segment], sources: Sources) -> None:
        """Find the documents' tokens, those of `stores`; UserError if a store has no such document."""
        self._stores, self._sources, self._seq_lengths = stores, sources, sources.seq_lengths
        masks = [(segment.from_sample, segment.masked) for segment in segments if segment.masked is not None]
        self._begins = [begin for begin, _ in masks]
        self._documents = [frozenset(documents) for _, documents in masks]
        self._intervals = [self._addresses(documents) for _, documents in masks]

    def __bool__(self) -> bool:
        return bool(self._begins)

    def digests(self, names: Sequence[str]) -> list[tuple[int, str]]:
        """Return the sample at which each mask begins, and what it depends on: documents, and the names of orders.

        `names` has one a source.
        """
        owned = dict(zip(reversed(self._sources.owners), reversed(names)))  # of a store the first source
        found = []
        for begin, documents in zip(self._begins, self._documents):
            named = sorted([owned[store], number] for store, number in documents)
            found.append((begin, xxhash.xxh3_64_hexdigest(orjson.dumps(named))))
        return found

    def holds(self, sample: int, source: int, document: int) -> bool:
        """Return whether the loss of a document is masked in a sample."""
        at = bisect_right(self._begins, sample) - 1
        return at >= 0 and (self._sources.owners[source], document) in self._documents[at]

    def apply(
        self, loss_mask: npt.NDArray[np.float32], samples: Sequence[int], places: Iterable[tuple[int, int]]
    ) -> None:
        """Put 0 into the loss masks [samples, seq_length] of samples, each at its place, a source and an address."""
        for mask, sample, (source, start) in zip(loss_mask, samples, places, strict=True):
            at = bisect_right(self._begins, sample) - 1
            owner = self._sources.owners[source]
            begins, stops = self._intervals[at].get(owner, _NONE) if at >= 0 else _NONE
            if not len(begins):
                continue
            for place, label, size in self._labels(source, start):
                first, last = np.searchsorted(stops, label, "right"), np.searchsorted(begins, label + size, "left")
                for begin, stop in zip(begins[first:last].tolist(), stops[first:last].tolist()):
                    mask[place + max(begin - label, 0) : place + min(stop - label, size)] = 0

    def _labels(self, source: int, start: int) -> list[tuple[int, int, int]]:
        """Return the runs of labels in a row: position, address and number of each; one, or one a packed document.

        That of a row that is not packed has one more, of the label's label, which is beyond the mask.
        """
        seq_length = self._seq_lengths[source]
        pieces = self._sources.stores[source].rows.pieces(start // seq_length, seq_length)
        ends = accumulate(piece.size for piece in pieces)
        return [(end - piece.size, piece.start + 1, piece.size) for piece, end in zip(pieces, ends)]

    def _addresses(self, documents: Documents) -> dict[int, tuple[Int64s, Int64s]]:
        """Return for each source the sorted tokens [begins, stops) of its masked documents."""
        tokens_of: dict[int, list[tuple[int, int]]] = {}
        for source, number in sorted(set(documents)):
            store = self._stores[source]
            if store.shards.is_gone:  # nothing of it is read
                continue
            if not 0 <= number < store.num_documents:
                raise UserError(
                    f"document {number} of {store.place} cannot be masked: it has {store.num_documents}, "
                    "counted from 0",
                    hint=f"datakit inspect {quoted(store.place)}",
                )
            begin = store.first_token(number)
            tokens_of.setdefault(source, []).append((begin, begin + len(store.document(number))))
        return {source: tuple(np.array(spans, np.int64).T) for source, spans in tokens_of.items()}


_NONE = np.empty(0, np.int64), np.empty(0, np.int64)
