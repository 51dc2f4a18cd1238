"""View: what is known of a run from its lines, as texts, as JSON, and drawn for a terminal of any size."""

import json
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

MOST_POINTS, MOST_EVENTS, RECENT = 4000, 50, 50  # losses, events; steps whose times make a rate
ASCII = "."
LEFT_OUT = ("event", "step", "counts", "num_attempts")  # of what a reader sees of an event


class View:
    """A run up to its last line."""

    def __init__(self) -> None:
        self._losses: deque[tuple[int, float]] = deque(maxlen=MOST_POINTS)
        self._times_s: deque[float] = deque(maxlen=RECENT)
        self.events: deque[dict[str, Any]] = deque(maxlen=MOST_EVENTS)
        self.last: dict[str, Any] = {}  # the newest line of a step
        self.saved: dict[str, Any] = {}
        self.evaluated: dict[str, Any] = {}
        self.is_over = False

    def take(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Take new lines; steps that come again replace those that were."""
        for line in lines:
            kind = line.get("event")
            if kind is None:
                while self._losses and self._losses[-1][0] >= line["step"]:
                    self._losses.pop()
                self.last, self.is_over = dict(line), False
                if line.get("loss") is not None:
                    self._losses.append((line["step"], line["loss"]))
                if line.get("step_s"):
                    self._times_s.append(line["step_s"])
                continue
            self.events.append(dict(line))
            self.is_over = self.is_over or kind == "end"
            if kind == "resume":
                self.is_over = False
            elif kind == "save" and line.get("ok"):
                self.saved = dict(line)
            elif kind == "eval":
                self.evaluated = dict(line)

    @property
    def losses(self) -> Sequence[tuple[int, float]]:
        """Return the newest losses by step."""
        return self._losses

    @property
    def left_s(self) -> float | None:
        """Return the seconds that are left at the median time of the newest steps, None if they are not known."""
        total, step = self.last.get("train_steps"), self.last.get("step")
        if not total or not self._times_s or step is None:
            return None
        return max(total - step, 0) * statistics.median(self._times_s)

    def facts(self) -> list[tuple[str, str]]:
        """Return what is known as names and texts, the most important first."""
        last, left_s = self.last, self.left_s
        values = [
            ("loss", shown(last.get("loss"), ".4f")),
            ("left", "" if left_s is None or self.is_over else str(timedelta(seconds=round(left_s)))),
            ("rate", shown(last.get("tokens_per_s"), ",.0f", " tok/s")),
            ("mfu", shown(last.get("mfu"), ".1%")),
            ("gradient", shown(last.get("grad_norm"), ".3f")),
            ("rate of learning", shown(last.get("lr"), ".2e")),
            ("memory", shown(last.get("memory_gib"), ".2f", " GiB") + shown(last.get("memory_share"), ".0%", "", ", ")),
            ("gpu", shown(last.get("gpu_utilisation"), ".0%") + shown(last.get("gpu_power_w"), ".0f", " W", ", ")),
            ("step", shown(last.get("step_s"), ".3g", " s")),
            ("validation", shown(self.evaluated.get("loss"), ".4f", f" at step {self.evaluated.get('step')}")),
            ("saved", f"step {self.saved['step']}" if self.saved else ""),
        ]
        return [(name, text) for name, text in values if text]

    def to_json(self) -> str:
        """Return what is known as one document."""
        return json.dumps(
            {
                "last": self.last,
                "left_s": self.left_s,
                "saved": self.saved or None,
                "evaluated": self.evaluated or None,
                "is_over": self.is_over,
                "events": list(self.events),
            },
            indent=2,
        )

    def step_text(self) -> str:
        """Return where the run is, as step 12/100."""
        total = self.last.get("train_steps")
        return f"step {self.last.get('step', 0)}" + (f"/{total}" if total else "")


def shown(value: Any, form: str, unit: str = "", before: str = "") -> str:
    """Return a number as a text; nothing for None."""
    return "" if value is None else f"{before}{value:{form}}{unit}"


def line_text(line: Mapping[str, Any]) -> str:
    """Return a line of a metrics file for a reader: of a step the few numbers that matter, of an event what it has."""
    if "event" not in line:
        view = View()
        view.take([line])
        names = ("loss", "gradient", "rate", "mfu", "left", "memory")
        return "  ".join([view.step_text(), *(f"{name} {text}" for name, text in view.facts() if name in names)])
    values = {name: value for name, value in line.items() if name not in LEFT_OUT and value is not None}
    texts = [f"{name} {number_text(value)}" for name, value in values.items()]
    return f"step {line['step']}: {line['event']}{', ' if texts else ''}{', '.join(texts)}"


def number_text(value: Any) -> str:
    """Return a value of an event for a reader: few digits, true and false as yes and no."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {number_text(inner)}" for name, inner in value.items())
    return value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def curve(points: Sequence[tuple[int, float]], width: int, height: int, *, is_plain: bool = False) -> list[str]:
    """Return points drawn into cells, each of 2 x 4 dots of Braille, or with `is_plain` of one character.

    For example 40 x 5 cells have 80 x 20 dots: the column of a step is its share of the way from first to last.
    """
    across, down = (1, 1) if is_plain else (2, 4)
    columns, rows = width * across, height * down
    low, high = min(loss for _, loss in points), max(loss for _, loss in points)
    first, last = points[0][0], points[-1][0]
    cells = [[0] * width for _ in range(height)]
    marks = ((1, 8), (2, 16), (4, 32), (64, 128))  # the bits of the dots of a cell, by row and column
    for step, loss in points:
        column = round((step - first) / max(last - first, 1) * (columns - 1))
        row = round((high - loss) / ((high - low) or 1.0) * (rows - 1))
        cells[row // down][column // across] |= marks[row % down][column % across]
    return ["".join((ASCII if is_plain else chr(0x2800 + bits)) if bits else " " for bits in line) for line in cells]
