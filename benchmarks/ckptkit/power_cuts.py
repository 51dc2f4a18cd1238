"""What is left of acknowledged work after cuts of the power, on ext4 and on XFS: images that are mounted and looked at.

    python benchmarks/ckptkit/power_cuts.py --cuts 500    # as root

Every program of the tests for a loss of power runs on a disk that logs its writes and its flushes. At random moments
what no flush covers is lost at random; what is left is mounted, read, and the same work is done once more. Beside it
the same with one fsync left out, that of a file before it gets its name, and on a disk that acknowledges flushes and
may lose what they covered. Prints a table, and to stderr what was wrong how often.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.record import add_option

ROOT = Path(__file__).parents[2]
FILE_SYSTEMS = {"ext4": "ext4", "xfs": "XFS"}
DISKS = {
    "as it is": (),
    "an fsync left out": ("--without", "NewFile.publish"),
    "a disk that does no flush": ("--no-flush",),
}


def verdict(kind: str, words: tuple[str, ...], cuts: int) -> dict[str, Any]:
    """Return what the cuts of one file system showed."""
    command = [sys.executable, "-m", "tests.power_loss.on_image", "--file-system", kind, "--cuts", str(cuts), *words]
    run = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(run.stdout))


def main() -> int:
    """Cut the power of both file systems and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cuts", type=int, default=500, help="of each file system and disk")
    add_option(parser)
    arguments = parser.parse_args()
    print("| file system | disk | cuts | that lost blocks | promises | repaired | not mounted | with a fault | s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for kind, title in FILE_SYSTEMS.items():
        wrong = {}
        for disk, words in DISKS.items():
            seen = verdict(kind, words, arguments.cuts)
            wrong[disk] = sum(seen["faults"].values())
            counts = [seen[name] for name in ("cuts", "cuts_that_lost", "promises", "repaired", "not_mounted")]
            cells = [f"{count:,}" for count in (*counts, wrong[disk])]
            print("|", " | ".join([title, disk, *cells, f"{seen['seconds']:.0f}"]), "|", flush=True)
            for fault, times in sorted(seen["faults"].items()):
                print(f"{title}, {disk}, {times} times: {fault}", file=sys.stderr, flush=True)
        claim = f"cuts of the power on {title} after which acknowledged work is lost, or wrong"
        unit = f"of {arguments.cuts} cuts"
        arguments.record.add(claim, wrong.pop("as it is"), unit, limit=wrong)
    return 0


if __name__ == "__main__":
    sys.exit(main())
