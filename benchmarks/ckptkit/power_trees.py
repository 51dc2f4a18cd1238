"""How many different trees a loss of power may leave were looked at, and how many are wrong.

    python benchmarks/ckptkit/power_trees.py FOLDER --minutes 60 [PROGRAM ...]

Goes on with FOLDER for so long: tests/power_loss/in_parts.py says what a part is, and which trees are one. Then it
prints all that FOLDER has seen: trees by program, and of each how many come from which model and which kind of call.
"""

import argparse
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

from benchmarks.record import add_option

ROOT = Path(__file__).parents[2]
MODELS = ("weakest", "hosts", "journal")
CALLS = ("name", "data", "length", "fsync", "promise")


def main() -> int:
    """Go on with a folder, and print a table of all that it has."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="PROGRAM", help="all without one")
    parser.add_argument("--minutes", default="60")
    parser.add_argument("--random", default="60", help="states at random of each moment")
    add_option(parser)
    arguments = parser.parse_intermixed_args()
    words = [arguments.folder, *arguments.names, "--minutes", arguments.minutes, "--random", arguments.random]
    done = subprocess.run([sys.executable, "-m", "tests.power_loss.in_parts", *words], cwd=ROOT, check=False)
    if done.returncode:
        return done.returncode
    results = json.loads((arguments.folder / "results.json").read_text())
    print("| program | trees |", " | ".join((*MODELS, *CALLS)), "|")
    print("|---" * (2 + len(MODELS) + len(CALLS)) + "|")
    everything = Counter[str]()
    by_trees = sorted(
        results["by_program"].items(), key=lambda item: -sum(sum(calls.values()) for calls in item[1].values())
    )
    for name, models in by_trees:
        counts = Counter({model: sum(calls.values()) for model, calls in models.items()})
        trees = counts.total()
        for calls in models.values():
            counts.update(calls)
        print(f"| {name} | {trees:,} |", " | ".join(f"{counts[column]:,}" for column in (*MODELS, *CALLS)), "|")
        everything.update(counts)
    print(f"| all | {results['trees']:,} |", " | ".join(f"{everything[each]:,}" for each in (*MODELS, *CALLS)), "|")
    claim = "different trees that a loss of power may leave, after which acknowledged work is lost, or wrong"
    arguments.record.add(claim, results["wrong"], f"of {results['trees']:,} trees")
    return 0


if __name__ == "__main__":
    sys.exit(main())
