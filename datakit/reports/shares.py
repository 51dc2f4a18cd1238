"""Shares: what a run reads of each store of its blend, counted by arithmetic, and the same drawn over its steps."""

import os
from dataclasses import dataclass
from typing import Any

from datakit.stream.blend import Blend
from datakit.stream.steps import Steps
from threefold.plot import write_png

_POINTS = 200  # of a line
_MAX_NAMED = 20  # lines that a legend can hold


@dataclass(frozen=True, slots=True)
class Share:
    """What the first samples of a stream read of one store in rows of one length.

    `weight` is that in force at the last of them, all weights being 1 together. Of packed rows, which differ,
    `tokens_read` is what so many read on average. `epochs` is how often its rows are read, and
    `repeated_samples` counts the samples whose row was read before, of a stream with skips at least so many.
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


def shares(blend: Blend, num_samples: int) -> tuple[Share, ...]:
    """Return the share of each store in the stream's first samples."""
    weights = blend.mixture.weights_at(max(num_samples - 1, 0))
    found = []
    for store, weight, rows, length, count in zip(
        blend.stores, weights, blend.rows.tolist(), blend.sources.seq_lengths, blend.counts(num_samples).tolist()
    ):
        read = count * length if store.packing == "concat" else round(count * store.num_tokens / rows)
        epochs, repeated = count / max(rows, 1), max(count - rows, 0)
        share = weight / sum(weights)
        found.append(Share(str(store.path), share, store.num_tokens, rows, length, read, count, epochs, repeated))
    return tuple(found)


def source_name(blend: Blend, source: int) -> str:
    """Return the path of a source's store, with the length of its rows if the stream has several."""
    length = f", rows of {blend.sources.seq_lengths[source]:,}" if len(blend.sources.lengths) > 1 else ""
    return f"{blend.stores[source].path}{length}"


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
        axes[0].set_ylabel("tokens read")
        axes[1].set_ylabel("epochs")
        axes[1].axhline(1, color="grey", linewidth=0.8, linestyle="--")  # above it rows are read again
        axes[1].set_xlabel("step")
        if len(blend.stores) <= _MAX_NAMED:
            axes[0].legend(loc="upper left")
        write_png(path, figure)
