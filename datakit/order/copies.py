"""Copies: sources of equal content within one length of rows, as a store that is named twice; each has its own order.

A source's order is named by its content: its fingerprint, and `#k` after it if k sources with that fingerprint are read
before it in rows of the same length. So stores a, b and a copy of a are named A, B and A#1. A source counts from the
sample on at which it is first read, then by its number: what joins a stream later never renames what was read before.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from datakit.format.shard import Int64s
from datakit.order.sources import Sources

_MAX_NAMED = 3


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
