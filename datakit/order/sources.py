"""Sources: what a stream's weights are of, stores read in rows of one length; a store in two lengths is two of them.

A segment with another length ends all sources of before and lets new ones join, which begin at their first sample. So
the mixture needs to know nothing of it, and samples before the segment stay. With stores a and b, and rows of 8 tokens
that have 16 from sample 40 on, the sources are a and b in rows of 8, a and b in rows of 16. From sample 40 on the first
two have weight 0. A store that a length does not read makes no source of it, and needs no index of its rows.

A store that is named twice, or beside its copy, has an order of its own each time. It is named by the content: the
fingerprint, and `#k` after it if k sources with that fingerprint are read before it in rows of the same length. So
stores a, b and a copy of a are named A, B and A#1. A source counts from the sample on at which it is first read, then
by its number: what joins a stream later never renames what was read before.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from datakit.format.shard import Int64s
from datakit.order.batch_sizes import BatchSizes
from datakit.order.mixture import Segment, check_weights
from datakit.store.token_store import TokenStore
from threefold.errors import UserError

_MAX_NAMED = 3


@dataclass(frozen=True, slots=True)
class Sources:
    """The sources of a stream, an entry each, its segments with a weight for each, and its lengths of rows.

    `owners` are the numbers of the stores as they were handed over, `eras` how many lengths came before. Length
    `lengths[i]` begins at sample `begins[i]`.
    """

    stores: tuple[TokenStore, ...]
    owners: tuple[int, ...]
    eras: tuple[int, ...]
    segments: tuple[Segment, ...]
    begins: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, stores: Sequence[TokenStore], segments: Sequence[Segment], seq_length: int) -> "Sources":
        """Return the sources of stores, of which the segments have weights; UserError if a length is not a new one.

        A store whose first rows are of a later length is one of such rows; errors as of its `in_rows_of`.
        """
        lengths, begins, eras = [seq_length], [0], []
        for segment in segments:
            if segment.seq_length is not None:
                _check_length(segment, lengths[-1])
                lengths.append(segment.seq_length)
                begins.append(segment.from_sample)
            eras.append(len(begins) - 1)
        places = [(0, store) for store in range(len(stores))]
        if len(lengths) > 1:
            weights = _weights(segments, len(stores))
            read = {(era, store) for era, each in zip(eras, weights) for store, weight in enumerate(each) if weight}
            only_later = {store for _, store in read if (0, store) not in read}
            places = sorted(read.union(place for place in places if place[1] not in only_later))
            number_of = {place: number for number, place in enumerate(places)}
            segments = [
                replace(segment, weights=_spread(each, number_of, era)) if each else segment
                for segment, each, era in zip(segments, weights, eras)
            ]
        opened = [stores[store].in_rows_of(lengths[era]) if era else stores[store] for era, store in places]
        owners, era_of = [store for _, store in places], [era for era, _ in places]
        return cls(tuple(opened), tuple(owners), tuple(era_of), tuple(segments), tuple(begins), tuple(lengths))

    def in_stretches_of(self, sizes: Sequence[int]) -> "Sources":
        """Return them with stores of which stretches of so many tokens are fetched together, if they are and can be."""
        packed = [store.packing != "concat" for store in self.stores]
        found = [
            store if is_packed else store.in_stretches_of(size)
            for store, size, is_packed in zip(self.stores, sizes, packed)
        ]
        return replace(self, stores=tuple(found))

    @property
    def seq_lengths(self) -> list[int]:
        """The tokens of each source's rows."""
        return [self.lengths[era] for era in self.eras]

    def seq_length_at(self, sample: int) -> int:
        """Return the tokens of a sample's row."""
        return self.lengths[bisect_right(self.begins, sample) - 1]

    def check_steps(self, first: int, sizes: BatchSizes) -> None:
        """Raise UserError if one of the steps of such sizes from sample `first` on has rows of two lengths."""
        for begin, length in zip(self.begins, self.lengths):
            if begin <= first:
                continue
            number = sizes.steps_before(first, begin)
            step, after = (sizes.samples_after(first, count) for count in (number, number + 1))
            if begin != step:
                raise UserError(
                    f"rows have {length} tokens from sample {begin} on, in the middle of the step of samples {step} to "
                    f"{after - 1}: a step has rows of one length",
                    hint=f"from_sample = {after}; or --recorded, if batches had another size before",
                )


def _check_length(segment: Segment, before: int) -> None:
    if segment.seq_length is None or segment.seq_length in (before, 0) or segment.seq_length < 0:
        raise UserError(
            f"seq_length {segment.seq_length} from sample {segment.from_sample} on, after rows of {before} tokens",
            hint=f"seq_length = {2 * before}, or none of it: rows stay as they are",
        )


def _weights(segments: Sequence[Segment], num_stores: int) -> list[tuple[float, ...]]:
    """Return the weights of all stores from each segment on, () if it changes neither them nor the length."""
    found, in_force = [], segments[0].weights or ()
    for segment in segments:
        check_weights(segment.weights, num_stores)
        in_force = segment.weights or in_force
        found.append(() if segment.weights is None and segment.seq_length is None else in_force)
    return found


def _spread(weights: Sequence[float], number_of: dict[tuple[int, int], int], era: int) -> tuple[float, ...]:
    """Return the weights of all sources, those of other lengths 0."""
    found = [0.0] * len(number_of)
    for store, weight in enumerate(weights):
        if weight:
            found[number_of[era, store]] = weight
    return tuple(found)


def places_of_copies(sources: Sources, names: Sequence[str]) -> list[str]:
    """Return the places of the first sources that are copies by their names, each once."""
    return list(dict.fromkeys(store.place for store, name in zip(sources.stores, names) if "#" in name))[:_MAX_NAMED]


def names_of(sources: Sources, first_samples: Int64s) -> list[str]:
    """Return the names of the orders of all sources, each of which is first read at such a sample."""
    names, seen = [store.fingerprint for store in sources.stores], Counter[tuple[int, str]]()
    for source in np.argsort(first_samples, kind="stable").tolist():
        content = sources.eras[source], names[source]
        if seen[content]:
            names[source] += f"#{seen[content]}"
        seen[content] += 1
    return names
