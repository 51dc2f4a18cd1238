"""A timeline as text, a row of cells a rank, a cell a unit of time; or as a picture."""

import math
import statistics
from typing import Any

from trainer.pipeline.actions import PASSES, Action
from trainer.pipeline.simulate import Timeline

WIDTH = 120  # of a line, in characters
COLOURS = {"F": "#bfdbfe", "B": "#bbf7d0", "W": "#fde68a"}


def draw(timeline: Timeline, *, width: int = WIDTH) -> str:
    """Return a grid of a timeline's passes; one that is wider than a line continues in further grids below.

    The shortest pass is one cell, a dot is a cell of waiting, and dashes continue a longer pass: `F0 B0-- .  F1`. If
    ranks hold several stages a letter says which of its own a rank runs: F0b is on the second. A cell is a third of the
    median pass at least; a pass that is shorter than half of that may have none.
    """
    spans = {action: span for action, span in timeline.spans.items() if action.kind in PASSES}
    times = [end - start for start, end in spans.values()]
    unit = max(min(times), statistics.median(times) / 3)
    names = labels(timeline)
    size = max(map(len, names.values())) + 1
    num_cells = _cell(timeline.duration, unit)
    ranks = [f"rank {rank}  " for rank in range(len(timeline.schedule))]
    margin = max(map(len, ranks))
    rows = []
    for row in timeline.schedule:
        cells = [".".ljust(size)] * num_cells
        for action in row:
            first, stop = (_cell(time, unit) for time in spans.get(action, (0, 0)))
            if first < stop:
                text = names[action].ljust((stop - first) * size - 1, "-") + " "
                cells[first:stop] = [text[i : i + size] for i in range(0, len(text), size)]
        rows.append(cells)
    per_line = max((width - margin) // size, 1)
    grids = [
        "\n".join(
            (name.ljust(margin) + "".join(cells[start : start + per_line])).rstrip()
            for name, cells in zip(ranks, rows, strict=True)
        )
        for start in range(0, num_cells, per_line)
    ]
    return "\n\n".join(grids)


def figure(timeline: Timeline, title: str) -> Any:
    """Return a matplotlib figure of a timeline's passes: a bar a pass, a rank's second stage darker than its first."""
    from matplotlib.figure import Figure

    names, num_ranks = labels(timeline), len(timeline.schedule)
    drawn = Figure(figsize=(12, 1 + 0.5 * num_ranks), layout="constrained")
    axes: Any = drawn.subplots()
    for rank, row in enumerate(timeline.schedule):
        for action in (action for action in row if action in names):
            start, end = timeline.spans[action]
            alpha = 0.5 + 0.5 * (action.stage // num_ranks % 2)
            axes.barh(rank, end - start, left=start, color=COLOURS[action.kind], alpha=alpha, edgecolor="black")
            if len(row) <= WIDTH:
                axes.text((start + end) / 2, rank, names[action], ha="center", va="center", fontsize=6)
    axes.set(yticks=range(num_ranks), yticklabels=[f"rank {rank}" for rank in range(num_ranks)],
             xlim=(0, timeline.duration), title=f"{title}: {timeline}")  # fmt: skip
    axes.invert_yaxis()
    return drawn


def labels(timeline: Timeline) -> dict[Action, str]:
    """Return the name of each pass among those of its rank: F3, or with its stage F3a, F3b ..."""
    num_ranks, passes = len(timeline.schedule), [action for action in timeline.spans if action.kind in PASSES]
    has_several = any(action.stage >= num_ranks for action in passes)
    return {
        action: f"{action}{chr(ord('a') + action.stage // num_ranks)}" if has_several else str(action)
        for action in passes
    }


def _cell(time: float, unit: float) -> int:
    return math.floor(time / unit + 0.5)
