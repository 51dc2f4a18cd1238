"""Draw one number of several metrics files, by default the loss, as labelled curves over the steps into a PNG."""

import argparse
import json
import sys
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="[LABEL=]FILE.jsonl", help="the label defaults to the file's name")
    parser.add_argument("--output", type=Path, required=True, help="PNG to write")
    parser.add_argument("--key", default="loss", help="what to draw: any number of a step's line")
    parser.add_argument("--title", default="", help="headline of the plot")
    arguments = parser.parse_args(argv)

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for index, run in enumerate(arguments.runs):
        label, _, path = run.rpartition("=")
        points = read(Path(path), arguments.key)
        if not points:
            print(f"error: {path} holds no step with a {arguments.key}", file=sys.stderr)
            return 2
        # later runs are drawn thinner, so that a curve beneath one that it equals stays visible
        axes.plot(*zip(*points, strict=True), label=label or Path(path).stem, linewidth=max(4 - 1.2 * index, 1.2))
    axes.set(xlabel="step", ylabel=arguments.key.replace("_", " "), title=arguments.title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(arguments.output, dpi=150)
    return 0


def read(path: Path, key: str) -> list[tuple[int, float]]:
    """(step, value) of every step of a metrics file that has the value; a line cut short by a kill is left out."""
    texts = path.read_text(encoding="utf-8").splitlines(keepends=True)
    lines = [json.loads(text) for text in texts if text.endswith("\n")]
    return [(line["step"], line[key]) for line in lines if "event" not in line and line.get(key) is not None]


if __name__ == "__main__":
    sys.exit(main())
