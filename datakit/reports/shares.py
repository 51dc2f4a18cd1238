"""Shares: what a run reads of each store of its blend, counted by arithmetic, and the same drawn over its steps."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from datakit.config.steps import Steps
from datakit.format.shard import Int64s
from datakit.order.blend import Blend
from datakit.order.megatron_blend import MegatronBlend
from datakit.store.token_store import TokenStore
from threefold.plot import write_png

UNREAD_PART = 0.01  # of a store's tokens may be in no row without a line
_ROWS_AT_ONCE = 1 << 20
_POINTS = 200  # of a line
_MAX_NAMED = 20  # lines that a legend can hold


@dataclass(frozen=True, slots=True)
class Share:
    """What the first samples of a stream read of one store in rows of one length.

    `weight` is that in force at the last of them, all weights being 1 together. Of packed rows, which differ,
    `tokens_read` is what so many read on average. `epochs` is how often its rows are read, and `repeated_samples`
    counts the samples whose row was read before, or is by a copy of the store above: by content, not by place.
    `unread_tokens` are the last of the store, which are in none of its rows.
    """

    store: str
    weight: float
    num_tokens: int
    num_rows: int
    seq_length: int
    tokens_read: int
    num_samples: int
    epochs: float
    repeated_samples: int
    unread_tokens: int = 0


def shares(blend: Blend, num_samples: int) -> tuple[Share, ...]:
    """Return the share of each store in the stream's first samples."""
    weights = blend.mixture.weights_at(max(num_samples - 1, 0))
    return tuple(
        Share(
            store.place,
            weight / sum(weights),
            store.num_tokens,
            rows,
            length,
            count * length if store.packing == "concat" else round(count * store.num_tokens / rows),
            count,
            count / max(rows, 1),
            num_repeated,
            unread_tokens(store, rows, length),
        )
        for store, weight, rows, length, count, num_repeated in zip(
            blend.stores,
            weights,
            blend.rows.tolist(),
            blend.sources.seq_lengths,
            blend.counts(num_samples).tolist(),
            repeated(blend, num_samples),
        )
    )


def unread_tokens(store: TokenStore, num_rows: int, seq_length: int) -> int:
    """Return how many last tokens of a store are in no row: of 12 in rows of 4, which read 9 with a label, it is 3."""
    if store.packing != "concat":
        return 0
    return store.num_tokens - num_rows * seq_length - (num_rows > 0)


def unread_lines(blend: Blend) -> list[str]:
    """Return a line for each store of whose tokens more than a hundredth are in no row."""
    if isinstance(blend, MegatronBlend):
        return []
    lines = []
    for source, (store, rows, length) in enumerate(zip(blend.stores, blend.rows.tolist(), blend.sources.seq_lengths)):
        unread = unread_tokens(store, rows, length)
        if unread > store.num_tokens * UNREAD_PART:
            what = f"the last {unread:,} tokens of {source_name(blend, source)}, {unread / store.num_tokens:.1%}"
            lines.append(f"{what}, are in no row of {length:,} tokens")
    return lines


def repeated(blend: Blend, num_samples: int) -> list[int]:
    """Return of each source how many of the stream's first samples have a row that was read before.

    Copies, sources of equal content in rows of one length, count one after the other. That reads their orders, in a
    byte and some 50 ns a row. For other sources of a stream with skips, and for Megatron's order, it is the least.
    """
    counts, sizes = blend.counts(num_samples).tolist(), blend.rows.tolist()
    num_repeated = [max(count - size, 0) for count, size in zip(counts, sizes)]
    contents: dict[tuple[str, int], list[int]] = {}
    for source, content in enumerate(zip((store.fingerprint for store in blend.stores), blend.sources.seq_lengths)):
        contents.setdefault(content, []).append(source)
    for copies in contents.values():
        is_read, num_read = np.zeros(max(sizes[copies[0]], 1), np.bool_), 0
        for source in copies if len(copies) > 1 else ():
            before = num_read
            if isinstance(blend, MegatronBlend):
                num_read = min(before + counts[source], len(is_read))
            else:
                for rows in _rows_read(blend, source, num_samples):
                    is_read[rows] = True
                num_read = int(np.count_nonzero(is_read))
            num_repeated[source] = counts[source] - (num_read - before)
    return num_repeated


def _rows_read(blend: Blend, source: int, num_samples: int) -> Iterator[Int64s | slice]:
    """Yield the rows of a source that the stream's first samples read, some at a time."""
    size = max(int(blend.rows[source]), 1)
    for starts, stops in blend.mixture.ranges(num_samples):
        start, stop = int(starts[source]), int(stops[source])
        if -(-start // size) < stop // size:  # a whole epoch, as [3, 12) of 4 rows has [4, 8)
            yield slice(None)
            continue
        for first in range(start, stop, _ROWS_AT_ONCE):
            numbers = np.arange(first, min(first + _ROWS_AT_ONCE, stop))
            yield blend.rows_at(np.full_like(numbers, source), numbers)


def source_name(blend: Blend, source: int) -> str:
    """Return the place of a source's store, with the length of its rows if the stream has several."""
    length = f", rows of {blend.sources.seq_lengths[source]:,}" if len(blend.sources.lengths) > 1 else ""
    return f"{blend.stores[source].place}{length}"


def write_plot(blend: Blend, steps: Steps, last: int, path: str | os.PathLike[str]) -> None:
    """Write a PNG of the tokens and epochs of each store after each step up to the last, whole or not at all."""
    import matplotlib
    from matplotlib.figure import Figure

    first = steps.first_known
    shown = sorted({first + (last - first) * point // _POINTS for point in range(_POINTS + 1)})
    counts = [blend.counts(steps.num_samples(step)).tolist() for step in shown]
    with matplotlib.rc_context({"text.parse_math": False}):
        figure = Figure(figsize=(9, 7), layout="constrained")
        axes: Any = figure.subplots(2, sharex=True)
        for source, length in enumerate(blend.sources.seq_lengths):
            samples, rows = [count[source] for count in counts], max(int(blend.rows[source]), 1)
            axes[0].plot(shown, [count * length for count in samples], label=source_name(blend, source))
            axes[1].plot(shown, [count / rows for count in samples])
        axes[0].set(ylabel="tokens read")
        axes[1].set(ylabel="epochs", xlabel="step")
        axes[1].axhline(1, color="grey", linewidth=0.8, linestyle="--")  # above it rows are read again
        if len(blend.stores) <= _MAX_NAMED:
            axes[0].legend(loc="upper left")
        write_png(path, figure)
