"""Compare the losses of two metrics files step by step; exit 1 where they differ by more than the bounds.

The steps that both files hold are compared, in order: the first ones to a tight bound, the last one to its own.
"""

import argparse
import json
import sys
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("a", type=Path, metavar="A.jsonl")
    parser.add_argument("b", type=Path, metavar="B.jsonl", help="the reference: differences are relative to it")
    parser.add_argument("--first", type=int, default=20, help="how many first common steps --rtol bounds")
    parser.add_argument("--rtol", type=float, default=1e-5, help="bound on the first common steps")
    parser.add_argument("--last-rtol", type=float, default=1e-2, help="bound on the last common step")
    parser.add_argument("--key", default="loss", help="what to compare: any number of a step's line")
    arguments = parser.parse_args(argv)
    try:
        a, b = (read(path, arguments.key) for path in (arguments.a, arguments.b))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    steps = sorted(a.keys() & b.keys())
    if not steps:
        print(f"error: {arguments.a} and {arguments.b} have no step in common", file=sys.stderr)
        return 1
    gaps = {step: abs(a[step] - b[step]) / max(abs(b[step]), sys.float_info.min) for step in steps}
    first = max(steps[: arguments.first], key=lambda step: gaps[step])
    worst, last = max(steps, key=lambda step: gaps[step]), steps[-1]
    print(f"{len(steps)} common steps, {steps[0]} to {last}; {sum(gap == 0 for gap in gaps.values())} are equal")
    print(f"first {arguments.first}: {gaps[first]:.3e} at step {first} (bound {arguments.rtol:.0e})")
    print(f"all: {gaps[worst]:.3e} at step {worst}")
    print(f"last: {gaps[last]:.3e} at step {last} (bound {arguments.last_rtol:.0e})")
    agreed = all(gaps[step] <= arguments.rtol for step in steps[: arguments.first])  # false for a NaN, too
    return 0 if agreed and gaps[last] <= arguments.last_rtol else 1


def read(path: Path, key: str) -> dict[int, float]:
    """Return one number of each step of a metrics file.

    ValueError names a line that is none. A line cut short is left out.
    """
    values = {}
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(keepends=True), 1):
        if not text.endswith("\n"):
            continue
        try:
            line = json.loads(text)
            if "event" not in line:
                values[int(line["step"])] = float(line[key])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number}: no metrics line with a step and a {key}: {text[:80]!r}") from error
    return values


if __name__ == "__main__":
    sys.exit(main())
