"""Curve: the losses of a run as a picture, for sinks that hold pictures. Steps are thinned out to stay few."""

from collections.abc import Mapping
from io import BytesIO
from typing import Any

MOST_POINTS = 2000


class Curve:
    """Losses of training and of evaluations by step."""

    size = (960, 480)  # pixels

    def __init__(self, step: int) -> None:
        """Begin after a step."""
        self.first, self.step, self._every = step, step, 1
        self._points: list[tuple[int, float]] = []
        self._checked: list[tuple[int, float]] = []

    def add(self, line: Mapping[str, Any]) -> None:
        """Take the loss of a line, if it has one."""
        self.step = max(self.step, int(line["step"]))
        loss = line.get("loss")
        if loss is None:
            return
        if line.get("event") == "eval":
            self._checked.append((int(line["step"]), loss))
        elif "event" not in line and int(line["step"]) % self._every == 0:
            self._points.append((int(line["step"]), loss))
            if len(self._points) > MOST_POINTS:
                self._every *= 2
                self._points = [point for point in self._points if point[0] % self._every == 0]

    def png(self) -> bytes | None:
        """Return the picture; None without losses, or without matplotlib."""
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError:
            return None
        if not self._points:
            return None
        figure = Figure(figsize=(9.6, 4.8), dpi=100)
        axes = figure.subplots()
        for points, style, label in ((self._points, "-", "loss"), (self._checked, "o-", "validation loss")):
            if points:
                axes.plot(*zip(*points), style, label=label)
        axes.set_xlabel("step")
        axes.legend()
        stream = BytesIO()
        FigureCanvasAgg(figure).print_png(stream)
        return stream.getvalue()
