"""A timeline as text: a row of cells a rank, a cell a unit of time."""

import math

from trainer.pipeline.actions import PASSES
from trainer.pipeline.simulate import Timeline

WIDTH = 120  # of a line, in characters


def draw(timeline: Timeline, *, width: int = WIDTH) -> str:
    """Return a grid of a timeline's passes; one that is wider than a line continues in further grids below.

    The shortest pass is one cell, a dot is a cell of waiting, and dashes continue a longer pass: `F0 B0-- .  F1`.
    """
    spans = {action: span for action, span in timeline.spans.items() if action.kind in PASSES}
    unit = min(end - start for start, end in spans.values())
    size = max(len(str(action)) for action in spans) + 1
    num_cells = _cell(timeline.duration, unit)
    names = [f"rank {rank}  " for rank in range(len(timeline.schedule))]
    margin = max(map(len, names))
    rows = []
    for row in timeline.schedule:
        cells = [".".ljust(size)] * num_cells
        for action in row:
            if action in spans:
                first, stop = (_cell(time, unit) for time in spans[action])
                text = str(action).ljust((stop - first) * size - 1, "-") + " "
                cells[first:stop] = [text[i : i + size] for i in range(0, len(text), size)]
        rows.append(cells)
    per_line = max((width - margin) // size, 1)
    grids = [
        "\n".join(
            (name.ljust(margin) + "".join(cells[start : start + per_line])).rstrip()
            for name, cells in zip(names, rows, strict=True)
        )
        for start in range(0, num_cells, per_line)
    ]
    return "\n\n".join(grids)


def _cell(time: float, unit: float) -> int:
    """Return the number of the cell that a time is nearest to the start of."""
    return math.floor(time / unit + 0.5)
