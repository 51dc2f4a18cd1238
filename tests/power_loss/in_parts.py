"""Look at trees that a loss of power may leave, in parts that go on, and add up what was seen.

    python -m tests.power_loss.in_parts FOLDER --minutes 60 [PROGRAM ...]

FOLDER has results.json, and the keys of all trees that were looked at: a tree in which no reader sees a difference to
one of those is passed over, in whichever part, recording and model it comes. A part is one program: it is recorded
once more, every change is lost and kept by itself, and others are drawn. One use of fsync is left out of it, and must
be found.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.power_loss.exploring import ROOT, Recorded, fault_of, recorded
from tests.power_loss.programs import PROGRAMS
from tests.power_loss.unseen import RACES, UNSEEN
from tools.power_loss.equivalence import KEY_BYTES, Equivalence, kinds
from tools.power_loss.states import MODELS, make, states

ANOTHER_EVERY = 50  # trees, of programs that another attempt follows


@dataclass
class Results:
    """What all parts have seen: trees by program, model and kind of call, and what was wrong with any."""

    parts: int = 0
    trees: int = 0
    wrong: int = 0
    states: int = 0
    once_more: int = 0  # trees on which the work was done once more
    planted: int = 0
    planted_and_not_found: list[str] = field(default_factory=list)
    seconds: float = 0.0
    commits: list[str] = field(default_factory=list)
    faults: dict[str, int] = field(default_factory=dict)
    by_program: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)

    def add(self, name: str, model: str, call: str, fault: str) -> None:
        """Add a tree."""
        calls = self.by_program.setdefault(name, {}).setdefault(model, {})
        calls[call] = calls.get(call, 0) + 1
        self.trees += 1
        if fault:
            self.wrong += 1
            self.faults[f"{name}, {model}: {fault}"] = self.faults.get(f"{name}, {model}: {fault}", 0) + 1


class Parts:
    """A folder of results that go on; one process has it."""

    def __init__(self, folder: Path, until: float) -> None:
        folder.mkdir(exist_ok=True)
        self._until = until
        self._json, self._keys = folder / "results.json", folder / "seen"
        known = self._keys.read_bytes() if self._keys.exists() else b""
        self._seen = {known[at : at + KEY_BYTES] for at in range(0, len(known), KEY_BYTES)}
        content: dict[str, Any] = json.loads(self._json.read_text()) if self._json.exists() else {}
        self.results = Results(**content)
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
        self.results.commits = [*dict.fromkeys([*self.results.commits, commit.stdout.strip()])]

    @property
    def is_over(self) -> bool:
        """Return whether the time is over."""
        return time.monotonic() > self._until

    def go_on(self, name: str, num_random: int) -> None:
        """Do a part; if the time ends before it does, what was seen counts."""
        began, new = time.monotonic(), list[bytes]()
        with recorded(name) as program:
            for key in self._look(program, name, num_random):
                new.append(key)
            if not self.is_over:
                self._plant(program, name)
                self.results.parts += 1
        with self._keys.open("ab") as file:  # first: what is known and not counted is no tree too many
            file.write(b"".join(new))
        self.results.seconds = round(self.results.seconds + time.monotonic() - began, 1)
        temporary = self._json.with_suffix(".tmp")
        temporary.write_text(json.dumps(vars(self.results), indent=1) + "\n")
        os.replace(temporary, self._json)

    def _look(self, program: Recorded, name: str, num_random: int) -> Iterator[bytes]:
        trees, calls = Equivalence(program.recording, name), kinds(program.recording)
        for model in MODELS:
            for state in states(program.recording, model, num_random=num_random, seed=self.results.parts):
                self.results.states += 1
                key = trees.key(state)
                if key in self._seen:
                    continue
                if self.is_over:
                    return
                self._seen.add(key)
                shutil.rmtree(program.folder)
                make(program.recording.tree(state.changes), program.folder)
                once_more = program.program.again is None or self.results.trees % ANOTHER_EVERY == 0
                fault = fault_of(program.program, program.left, program.folder, state.promises, once_more=once_more)
                self.results.add(name, model, calls[state.moment], fault)
                self.results.once_more += once_more and program.program.is_repeatable
                yield key

    def _plant(self, program: Recorded, name: str) -> None:
        uses = sorted({sync.use for sync in program.recording.syncs} - UNSEEN.get(name, {}).keys())
        if uses and name not in RACES:
            use = uses[self.results.parts % len(uses)]
            self.results.planted += 1
            if not program.explore("weakest", without=use, stops_at_fault=True).faults:
                self.results.planted_and_not_found.append(f"{name}: {use}")


def main() -> int:
    """Go on with a folder of results, and print the sums."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="PROGRAM", help=f"of {', '.join(PROGRAMS)}; all without one")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--random", type=int, default=20, help="states at random of each moment")
    arguments = parser.parse_intermixed_args()
    if unknown := sorted({*arguments.names} - PROGRAMS.keys()):
        parser.error(f"no program is named {', '.join(unknown)}")
    parts, names = Parts(arguments.folder, time.monotonic() + 60 * arguments.minutes), arguments.names or [*PROGRAMS]
    while not parts.is_over:
        parts.go_on(names[parts.results.parts % len(names)], arguments.random)
    results = parts.results
    print(f"{results.trees:,} trees, {results.wrong:,} wrong, in {results.parts:,} parts and {results.seconds:,.0f} s")
    print(f"{results.planted:,} planted, not found: {results.planted_and_not_found}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
