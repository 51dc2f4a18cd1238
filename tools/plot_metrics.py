"""Draw one number of several metrics files, by default the loss, as labelled curves over the steps into a PNG.

Where a run was resumed, and where one was killed, its curve has a mark. The loss of evaluations is a dotted curve.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESUMED, KILLED = "resumed after step", "killed after step"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", metavar="[LABEL=]FILE.jsonl", help="the label defaults to the file's name")
    parser.add_argument("--output", type=Path, required=True, help="PNG to write")
    parser.add_argument("--key", default="loss", help="what to draw: any number of a step's line")
    parser.add_argument("--title", default="", help="headline of the plot")
    arguments = parser.parse_args(argv)

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    runs = [run.rpartition("=") for run in arguments.runs]
    lines_by_path = {path: read(Path(path)) for _, _, path in runs}
    last_step = max((line["step"] for lines in lines_by_path.values() for line in lines), default=0)
    for index, (name, _, path) in enumerate(runs):
        label, points = name or Path(path).stem, points_of(lines_by_path[path], arguments.key)
        if not points:
            print(f"error: {path} holds no step with a {arguments.key}", file=sys.stderr)
            return 2
        # later runs are drawn thinner, so that a curve beneath one that it equals stays visible
        [curve] = axes.plot(*zip(*points, strict=True), label=label, linewidth=max(4 - 1.2 * index, 1.2))
        if evaluated := evaluations(lines_by_path[path]) if arguments.key == "loss" else []:
            style = {"color": curve.get_color(), "linestyle": ":", "marker": ".", "linewidth": max(3 - index, 1)}
            axes.plot(*zip(*evaluated, strict=True), label=f"{label}: validation", **style)
        for step, how in marks(lines_by_path[path], last_step):
            at = min(points, key=lambda point: abs(point[0] - step))
            shape = {"marker": "x"} if how == KILLED else {"marker": "o", "fillstyle": "none"}
            axes.plot(*at, label=f"{label}: {how} {step}", color="black", markersize=9, linestyle="none", **shape)
    axes.set(xlabel="step", ylabel=arguments.key.replace("_", " "), title=arguments.title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(arguments.output, dpi=150)
    return 0


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file, steps and events; one that was cut short by a kill is left out."""
    texts = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(text) for text in texts if text.endswith("\n")]


def points_of(lines: Sequence[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    """(step, value) of every step that has the value."""
    return [(line["step"], line[key]) for line in lines if "event" not in line and line.get(key) is not None]


def evaluations(lines: Sequence[dict[str, Any]]) -> list[tuple[int, float]]:
    """(step, loss) of every evaluation."""
    return [(line["step"], line["loss"]) for line in lines if line.get("event") == "eval" and "loss" in line]


def marks(lines: Sequence[dict[str, Any]], last_step: int) -> list[tuple[int, str]]:
    """Return the steps after which a run was resumed or killed.

    A killed run is one that comes to no end of its own: its file stops before `last_step`, which another run reached.
    """
    found = [(line["step"], RESUMED) for line in lines if line.get("event") == "resume"]
    steps = [number for number, line in enumerate(lines) if "event" not in line]
    if steps and lines[steps[-1]]["step"] < last_step:
        is_ended = any(line.get("event") == "end" for line in lines[steps[-1] :])
        found += [] if is_ended else [(lines[steps[-1]]["step"], KILLED)]
    return found


if __name__ == "__main__":
    sys.exit(main())
