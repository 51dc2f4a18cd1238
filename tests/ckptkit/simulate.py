"""Run seeds of the simulation, in parts that go on: `python -m tests.ckptkit.simulate --seeds 1000 --tally night.json`.

The file has how many seeds were run, from 0 on, and how often each situation came up; the next call goes on after
them. Those that were never reached are printed, one a line. Ends with 1 if a seed breaks a promise, which is printed
with the last requests and repeated by the next call.
"""

import argparse
import json
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

import pytest

from tests.ckptkit.support.inline_pools import inline_pools
from tests.ckptkit.support.simulated_time import SimulatedTime, simulated_time
from tests.ckptkit.support.simulation import simulate
from tests.ckptkit.support.situations import SITUATIONS

SAVE_EVERY = 50  # seeds


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1000, help="how many more")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="at most, for all of them")
    parser.add_argument("--tally", type=Path, required=True, help="file of JSON to which the counts are added")
    arguments = parser.parse_args(words)
    with pytest.MonkeyPatch.context() as monkeypatch:
        inline_pools(monkeypatch)
        return run_part(arguments.tally, arguments.seeds, arguments.seconds, simulated_time(monkeypatch))


def run_part(tally: Path, num_seeds: int, seconds: float, clock: SimulatedTime) -> int:
    """Run seeds after those of a tally, and add their counts to it."""
    counts, begun, ends_at = Counter[str](), 0, time.monotonic() + seconds
    if tally.exists():
        document = json.loads(tally.read_text())
        counts, begun = Counter(document["situations"]), document["seeds"]
    done, fault = begun, None
    while done < begun + num_seeds and time.monotonic() < ends_at and fault is None:
        try:
            counts.update(simulate(done, clock).situations.counts)
            done += 1
        except BaseException as error:  # what breaks is no Exception, so that no program catches it
            fault = error
        if fault or done % SAVE_EVERY == 0:
            _write(tally, counts, done)
    _write(tally, counts, done)
    if fault is not None:
        traceback.print_exception(fault)
        return 1
    missing = [name for name in SITUATIONS if not counts[name]]
    print(f"{done} seeds, {len(SITUATIONS) - len(missing)} of {len(SITUATIONS)} situations reached")
    for name in missing:
        print(f"never: {name}: {SITUATIONS[name]}")
    return 0


def _write(tally: Path, counts: Counter[str], num_seeds: int) -> None:
    """Write a tally, whole or not at all."""
    document = {"seeds": num_seeds, "situations": {name: counts[name] for name in SITUATIONS}}
    unnamed = tally.with_suffix(".tmp")
    unnamed.write_text(json.dumps(document, indent=1) + "\n")
    unnamed.replace(tally)


if __name__ == "__main__":
    sys.exit(main())
