"""Provenance: which documents the samples of a stream read, and which samples read a document, by arithmetic alone.

A sample reads the tokens [start, start + L] of its store: L inputs, and the label of the last one. So a document whose
first token begins a row is read by the row before too, as its last label. A packed row reads pieces of documents, and
the label after each that its document goes on after. `blame` and `where` are each other's inverse. Nothing is logged,
and no token is read: the cost is that of the indices' pages that hold the documents.
"""

from collections import defaultdict
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from datakit.format.origins import Origin
from datakit.format.shard import Int64s
from datakit.order.blend import Blend
from datakit.store.token_store import TokenStore
from threefold.errors import CheckFailed, UserError, quoted


@dataclass(frozen=True, slots=True)
class Passages:
    """Columns of equal length: sample `samples[i]` reads tokens [starts[i], stops[i]) of a document of a store.

    Samples are in the order in which they were asked for, a sample's passages in the order of its tokens. `sources` are
    numbers of the blend's stores.
    """

    samples: Int64s
    sources: Int64s
    documents: Int64s
    starts: Int64s
    stops: Int64s

    def __len__(self) -> int:
        return len(self.samples)

    def rows(self) -> list[tuple[int, int, int, int, int]]:
        """Return sample, source, document, start and stop of each passage."""
        return list(zip(*(getattr(self, column.name).tolist() for column in fields(self))))

    def origins(self, blend: Blend) -> list[Origin]:
        """Return where the document of each passage came from; each shard's file of origins is opened once."""
        places: dict[tuple[int, int], list[int]] = defaultdict(list)
        for place, (_, source, document, _, _) in enumerate(self.rows()):
            places[source, blend.stores[source].shard_of(document)].append(place)
        found: dict[int, Origin] = {}
        for (source, shard), inside in places.items():
            store = blend.stores[source]
            numbers = self.documents[inside] - store.document_starts[shard]
            found |= zip(inside, store.origins(shard).of(numbers))
        return [found[place] for place in range(len(self))]


def blame(blend: Blend, samples: npt.ArrayLike) -> Passages:
    """Return the passages that one or more global samples read, those of a sample in the order of its tokens."""
    asked, seq_lengths = np.array(samples, ndmin=1), blend.sources.seq_lengths
    # of each run of a row's tokens in a shard: row, source, shard, tokens there, their size, first document, documents
    spans: list[tuple[int, ...]] = []
    pointers, lengths = [], []  # of these documents, in the shard's index
    for row, (source, start) in enumerate(zip(*(column.tolist() for column in blend.addresses(asked)))):
        store, length = blend.stores[source], seq_lengths[source]
        for begin, stop in store.row_spans(start // length, length):
            while begin < stop:
                shard, origin = store.locate_token(begin)
                until = min(stop, store.token_starts[shard + 1])
                index, itemsize = store.shard(shard).index, store.itemsize
                first, last = (index.sequence_at((token - origin) * itemsize) for token in (begin, until - 1))
                if not 0 <= first <= last:
                    raise _damaged(store, shard)
                pointers.append(index.pointers[first : last + 1])
                lengths.append(index.lengths[first : last + 1])
                document, tokens = store.document_starts[shard] + first, (begin - origin, until - origin)
                spans.append((row, source, shard, *tokens, itemsize, document, last + 1 - first))
                begin = until
    rows, sources, shards, begins, stops, itemsizes, firsts, counts = np.array(spans, np.int64).T
    heads = np.cumsum(counts) - counts
    span = np.repeat(np.arange(len(spans)), counts)
    documents = np.arange(len(span)) + (firsts - heads)[span]
    at = np.concatenate(pointers) // itemsizes[span]
    starts, ends = np.maximum(begins[span] - at, 0), np.minimum(stops[span] - at, np.concatenate(lengths))
    for wrong in np.flatnonzero(np.add.reduceat(np.maximum(ends - starts, 0), heads) != stops - begins)[:1].tolist():
        raise _damaged(blend.stores[sources[wrong]], int(shards[wrong]))
    columns = asked[rows[span]].astype(np.int64), sources[span], documents, starts, ends
    return Passages(*(column[ends > starts] for column in columns))  # empty documents are read by nobody


def where(blend: Blend, source: int, document: int, num_samples: int) -> Passages:
    """Return the passages of one document that the stream's first samples read, in the order of samples.

    There are none of an empty document, or of one in the tokens at a store's end that make no row. UserError if the
    store has no such document.
    """
    store, length = blend.stores[source], blend.sources.seq_lengths[source]
    if not 0 <= document < store.num_documents:
        raise UserError(
            f"{store.place} has {store.num_documents} documents, counted from 0, and none of number {document}",
            hint=f"--document {quoted(f'{store.place}:{max(store.num_documents - 1, 0)}')}",
        )
    begin = store.first_token(document)
    end = begin + len(store.document(document))
    rows = store.rows_of(document, length)
    samples = blend.samples_of(source, rows, num_samples) if len(rows) else np.empty(0, np.int64)
    heads = blend.addresses(samples)[1].tolist() if len(samples) else []
    read = [
        (sample, max(start, begin) - begin, min(stop, end) - begin)
        for sample, head in zip(samples.tolist(), heads)
        for start, stop in store.row_spans(head // length, length)
        if start < end and stop > begin
    ]
    samples, starts, stops = np.array(read, np.int64).reshape(-1, 3).T
    return Passages(samples, np.full_like(samples, source), np.full_like(samples, document), starts, stops)


def _damaged(store: TokenStore, shard: int) -> CheckFailed:
    return CheckFailed(
        f"{store.shard(shard).idx_path} is damaged: its documents do not follow each other",
        hint=f"datakit verify {quoted(store.place)}",
    )
