"""Statistics of stores: how long documents are and where the tokens came from; exact, in one pass over the index.

O(documents), without reading a token. Memory is one table of 8 MiB, windows of a million documents, and the counts of
each source file: lengths below 2^20 tokens are counted in the table, the few documents beyond one by one.
"""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from datakit.format.origins import Origins
from datakit.format.shard import Int64s, ShardIndex
from datakit.store.token_store import TokenStore
from threefold.errors import CheckFailed, quoted

MAX_NAMED_SOURCES = 20
_TABLE_TOKENS = 1 << 20
WINDOW_DOCUMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class Counts:
    """What is in one store, or came from one source file."""

    path: str
    num_documents: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """Documents' lengths in tokens: order statistics, each the length of some document (nearest rank), and the mean."""

    min: int
    median: int
    p90: int
    p99: int
    max: int
    mean: float


@dataclass(frozen=True, slots=True)
class Bucket:
    """The documents of `min_length` to `max_length` tokens."""

    min_length: int
    max_length: int
    num_documents: int
    num_tokens: int

    @property
    def name(self) -> str:
        """The lengths, as a reader sees them."""
        low, high = f"{self.min_length:,}", f"{self.max_length:,}"
        return low if low == high else f"{low} to {high}"


@dataclass(frozen=True, slots=True)
class TagCounts:
    """What came from the source files of one tag; `name` is None for those without."""

    name: str | None
    num_documents: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class OtherSources:
    """What came from all source files that are not named."""

    num_sources: int
    num_documents: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Statistics:
    """What is known of some stores together; `sources` are those of most tokens, `other_sources` all others.

    `tags` are all that have documents, those of most tokens first, and then what has none; empty where nothing has one.
    """

    stores: tuple[Counts, ...]
    num_documents: int
    num_tokens: int
    num_empty_documents: int
    lengths: Lengths | None
    histogram: tuple[Bucket, ...]
    sources: tuple[Counts, ...]
    other_sources: OtherSources
    tags: tuple[TagCounts, ...]

    @property
    def source_rows(self) -> list[tuple[str, int, int]]:
        """Name, documents and tokens of each source, then of all others together."""
        rows = [(source.path or "no source", source.num_documents, source.num_tokens) for source in self.sources]
        others = self.other_sources
        more = [(f"{others.num_sources:,} others", others.num_documents, others.num_tokens)]
        return rows + more * (others.num_sources > 0)

    @property
    def tag_rows(self) -> list[tuple[str, int, int]]:
        """Name, documents and tokens of each tag."""
        return [(tag.name or "no tag", tag.num_documents, tag.num_tokens) for tag in self.tags]


def statistics(paths: Sequence[str | os.PathLike[str]], *, window_documents: int = WINDOW_DOCUMENTS) -> Statistics:
    """Return the statistics of these stores, together; damage that shows in an index is a CheckFailed.

    In memory are the lengths and sources of a window of documents.
    """
    stores = [TokenStore.open(path) for path in paths]
    lengths, sources = _LengthCounts(), _SourceCounts()
    for store in stores:
        for number in range(len(store.manifest.shards)):
            _count_shard(store, number, lengths, sources, window_documents)
    named, others = sources.ranked()
    return Statistics(
        stores=tuple(Counts(str(store.path), store.num_documents, store.num_tokens) for store in stores),
        num_documents=sum(store.num_documents for store in stores),
        num_tokens=sum(store.num_tokens for store in stores),
        num_empty_documents=int(lengths.table[0]),
        lengths=lengths.order(),
        histogram=tuple(lengths.histogram()),
        sources=named,
        other_sources=others,
        tags=sources.tags(),
    )


def _count_shard(
    store: TokenStore, number: int, lengths: "_LengthCounts", sources: "_SourceCounts", window_documents: int
) -> None:
    entry = store.manifest.shards[number]
    index = ShardIndex(store.path / f"{entry.name}.idx")  # not through the store, which would keep it mapped
    origins = store.origins(number)
    if index.num_sequences != entry.num_documents:
        raise _damaged(
            index.path, f"{index.num_sequences} sequences, its manifest says {entry.num_documents} documents"
        )
    num_tokens, paths = 0, origins.sources
    tags = [store.tags.of(number, path) for path in paths] if store.tags else [None] * len(paths)
    for start in range(0, index.num_sequences, window_documents):
        window = index.lengths[start : start + window_documents].astype(np.int64)
        if window.min() < 0:
            raise _damaged(index.path, f"a document of {window.min()} tokens")
        num_tokens += int(window.sum())
        lengths.add(window)
        sources.add(paths, tags, origins, start, window)
    if num_tokens != entry.num_tokens:
        raise _damaged(index.path, f"{num_tokens} tokens, its manifest says {entry.num_tokens}")


class _LengthCounts:
    """How many documents there are of each length."""

    def __init__(self) -> None:
        self.table = np.zeros(_TABLE_TOKENS, np.int64)
        self._beyond: Counter[int] = Counter()

    def add(self, lengths: Int64s) -> None:
        is_short = lengths < _TABLE_TOKENS
        counts = np.bincount(lengths[is_short])
        self.table[: len(counts)] += counts
        self._beyond.update(lengths[~is_short].tolist())

    def order(self) -> Lengths | None:
        """Return the order statistics, None without a document."""
        lengths, counts = self._columns()
        if not len(lengths):
            return None
        ranks = np.cumsum(counts)
        num_documents = int(ranks[-1])

        def at(percent: int) -> int:
            return int(lengths[np.searchsorted(ranks, max(1, -(-percent * num_documents // 100)))])

        mean = int((lengths * counts).sum()) / num_documents
        return Lengths(at(0), at(50), at(90), at(99), at(100), mean)

    def histogram(self) -> Iterator[Bucket]:
        """Documents by powers of two: 0, 1, 2 to 3, 4 to 7, ... up to the longest."""
        lengths, counts = self._columns()
        for bits in range(int(lengths[-1]).bit_length() + 1 if len(lengths) else 0):
            low, high = (1 << bits) >> 1, max((1 << bits) - 1, 0)
            first, last = np.searchsorted(lengths, [low, high + 1])
            num_tokens = int((lengths[first:last] * counts[first:last]).sum())
            yield Bucket(low, high, int(counts[first:last].sum()), num_tokens)

    def _columns(self) -> tuple[Int64s, Int64s]:
        """Return the lengths that occur, ascending, and how often each does."""
        short, beyond = np.flatnonzero(self.table), sorted(self._beyond)
        lengths = np.concatenate([short, np.array(beyond, np.int64)])
        beyond_counts = np.array([self._beyond[length] for length in beyond], np.int64)
        return lengths, np.concatenate([self.table[short], beyond_counts])


class _SourceCounts:
    """Documents and tokens of each source file and of each tag."""

    def __init__(self) -> None:
        self._tag_documents: Counter[str | None] = Counter()
        self._tag_tokens: Counter[str | None] = Counter()
        self._documents: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()

    def add(self, paths: list[str], tags: Sequence[str | None], origins: Origins, start: int, lengths: Int64s) -> None:
        """Count the documents from `start` on of a shard, which have these lengths; each path has its tag."""
        numbers = origins.source_numbers[start : start + len(lengths)].astype(np.int64)
        if numbers.max() >= len(paths):
            raise _damaged(origins.path, f"a document names source {numbers.max()} of {len(paths)}")
        named, inverse = np.unique(numbers, return_inverse=True)
        tokens = np.zeros(len(named), np.int64)
        np.add.at(tokens, inverse, lengths)
        for number, num_documents, num_tokens in zip(named.tolist(), np.bincount(inverse).tolist(), tokens.tolist()):
            self._documents[paths[number]] += num_documents
            self._tokens[paths[number]] += num_tokens
            self._tag_documents[tags[number]] += num_documents
            self._tag_tokens[tags[number]] += num_tokens

    def ranked(self) -> tuple[tuple[Counts, ...], OtherSources]:
        """Return the sources of most tokens, the first by name among equals, and the sum of the others."""
        order = sorted(self._tokens, key=lambda path: (-self._tokens[path], path))
        named = tuple(Counts(path, self._documents[path], self._tokens[path]) for path in order[:MAX_NAMED_SOURCES])
        return named, OtherSources(
            num_sources=len(order) - len(named),
            num_documents=self._documents.total() - sum(source.num_documents for source in named),
            num_tokens=self._tokens.total() - sum(source.num_tokens for source in named),
        )

    def tags(self) -> tuple[TagCounts, ...]:
        """Return the tags of most tokens first, the first by name among equals; what has none last."""
        names = sorted(filter(None, self._tag_tokens), key=lambda name: (-self._tag_tokens[name], name))
        every = [*names, *([None] if names and None in self._tag_tokens else [])]
        return tuple(TagCounts(name, self._tag_documents[name], self._tag_tokens[name]) for name in every)


def _damaged(file: Path, what: str) -> CheckFailed:
    return CheckFailed(f"{file} is damaged: {what}", hint=f"datakit verify {quoted(file.parent)}")
