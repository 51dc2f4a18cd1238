"""Try parsers on made-up bytes: `python -m tests.fuzzing --seconds 60 [NAME...]`; a JSON line each, 1 for a fault.

With `--corpus FOLDER` the inputs that led to a new place are kept there, and are where the next time begins.
"""

import argparse
import json
import sys
from pathlib import Path

from tests.fuzzing.parsers import PARSERS
from tools.fuzzing.fuzz import fuzz


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PARSERS)}; all without one")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each parser")
    parser.add_argument("--executions", type=int, default=1 << 62, help="at most, for each parser")
    parser.add_argument("--seed", type=int, default=0, help="of the random generator")
    parser.add_argument("--corpus", type=Path, help="folder of kept inputs, a folder in it for each parser")
    arguments = parser.parse_args()
    faults = 0
    for name in arguments.names or PARSERS:
        corpus = arguments.corpus / name if arguments.corpus else None
        tally = fuzz(
            PARSERS[name],
            executions=arguments.executions,
            seconds=arguments.seconds,
            seed=arguments.seed,
            corpus=corpus,
        )
        faults += len(tally.faults)
        print(json.dumps({"parser": name, **vars(tally)}), flush=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
