"""Screen: a view on a terminal, drawn again as lines come; all that does not fit is left out, the curve last."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from threefold.masking import printable
from trainer.observe.watch.view import View, curve, line_text

LEAST_CURVE, LEAST_WIDTH = 3, 24  # rows and columns below which no curve is drawn
SILENT_S = 60.0


def drawn(view: View, place: str, *, width: int, height: int, silent_s: float, is_plain: bool) -> list[str]:
    """Return the rows of a screen of a size, none longer than it and no more than fit."""
    head = f"{view.step_text()}  {'over' if view.is_over else ''}  {printable(place)}"
    if silent_s >= SILENT_S and not view.is_over:
        head = f"{view.step_text()}  no line for {timedelta(seconds=round(silent_s))}  {printable(place)}"
    rows = [head, bar(view, width, is_plain=is_plain), *columns_of(view.facts(), width)]
    events = [f"  {printable(line_text(event))}" for event in list(view.events)[-max(min(6, height // 4), 1) :]]
    room = height - len(rows) - len(events) - 3
    if len(view.losses) > 1 and room >= LEAST_CURVE and width >= LEAST_WIDTH:
        losses, margin = list(view.losses), 9
        lines = curve(losses, width - margin, min(room, 16), is_plain=is_plain)
        high, low = max(loss for _, loss in losses), min(loss for _, loss in losses)
        labels = {0: f"{high:.4g}", len(lines) - 1: f"{low:.4g}"}
        rows += ["", *(f"{labels.get(number, ''):>{margin - 1}} {line}" for number, line in enumerate(lines))]
        first, last = f"step {losses[0][0]}", str(losses[-1][0])
        rows += [" " * margin + first + last.rjust(max(width - margin - len(first), 1))]
    rows += events
    return [row[:width].rstrip() for row in rows[:height]]


def bar(view: View, width: int, *, is_plain: bool) -> str:
    """Return how far the run is as a bar; nothing if its length is not known."""
    total, step = view.last.get("train_steps"), view.last.get("step", 0)
    if not total:
        return ""
    size = max(min(width, 60) - 7, 1)
    full = round(min(step / total, 1.0) * size)
    done, rest = ("#", "-") if is_plain else ("━", "─")
    return f"{done * full}{rest * (size - full)} {min(step / total, 1.0):5.1%}"


def columns_of(facts: list[tuple[str, str]], width: int) -> list[str]:
    """Return facts in as many columns as fit, row by row."""
    cells = [f"{name} {text}" for name, text in facts]
    size = max((len(cell) for cell in cells), default=0) + 2
    number = max(width // size, 1)
    return ["".join(cell.ljust(size) for cell in cells[at : at + number]) for at in range(0, len(cells), number)]


@contextmanager
def screen(view: View, place: str) -> Iterator[Callable[[float], None]]:
    """Yield what draws a view on this terminal, with how long no line has come; what was drawn last stays."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(file=sys.stdout)
    is_plain = not (console.encoding or "").lower().startswith("utf")

    def rendered(silent_s: float) -> Any:
        size = console.size
        rows = drawn(view, place, width=size.width, height=size.height - 1, silent_s=silent_s, is_plain=is_plain)
        return Text("\n".join(rows), no_wrap=True, overflow="crop")

    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        yield lambda silent_s: live.update(rendered(silent_s), refresh=True)


class Silence:
    """How long no line has come."""

    def __init__(self) -> None:
        self._since_s = time.monotonic()

    def heard(self) -> None:
        """Begin again: a line came."""
        self._since_s = time.monotonic()

    @property
    def seconds(self) -> float:
        """Return the seconds since the last line."""
        return time.monotonic() - self._since_s
