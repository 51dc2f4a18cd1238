"""Save, copy, reshard and prune killed with SIGKILL at random moments and run again: nothing is lost, nothing is left.

    PYTHONPATH=. python benchmarks/ckptkit/kill.py [--rounds 40] [--seed 1]

The rounds go in turn through the four commands, on a local disk and on a real S3 server that this program starts. A run
without a kill tells how long a command lives and when it first changes its place; most kills come after that. Of every
three kills one hits the command alone, whose writers live on. The same command then runs again and has to succeed; its
step has to verify and to have the hash of the source's. At the end each run is pruned once, with
`--orphans-older-than 0s`; then folder and bucket hold the files that committed roots name, and no other file, no empty
folder and no unfinished upload. Prints a table, and what is wrong; exit code 1 where anything is.
"""

import argparse
import itertools
import os
import random
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.killing import kill_after, main_of, wait_until_gone
from ckptkit import (
    Box,
    Checkpointer,
    CheckpointReader,
    Cut,
    ParallelLayout,
    Piece,
    Placement,
    TensorInfo,
    committed_steps,
    copy_step,
    hash_checkpoint,
    verify_checkpoint,
)
from threefold.storage import Storage, open_storage
from threefold.storage.stale_uploads import abort_stale_uploads

COMMANDS = ("save", "copy", "reshard", "prune")
ROWS = 1200  # of 4 KiB: two files of more than one part of an upload each, 19 MiB in all
STEPS_A_PRUNE = 2
SAVE = "import sys; from benchmarks.ckptkit.kill import save; sys.exit(save(sys.argv[1], int(sys.argv[2])))"
LAYOUT = ParallelLayout(tp=2)
TENSORS = [
    TensorInfo(f"layers.{layer}.mlp.up.weight", "F32", (ROWS, 1024), Placement(layer, (Cut(0),))) for layer in range(4)
]


@dataclass
class Tally:
    """What became of the rounds of one command in one place."""

    killed: int = 0
    too_late: int = 0
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Life:
    """Seconds from a command's start to the first change that it makes, and to its end."""

    change_s: float
    end_s: float

    def moment(self, rng: random.Random) -> float:
        """Return a moment to kill at: one in four of the whole life, else of the part that changes something."""
        return rng.uniform(0.0 if rng.random() < 0.25 else self.change_s, self.end_s)


class Place:
    """One storage with a run for each command, and the source that all steps are of."""

    def __init__(self, name: str, url: str, source: str, hashes: dict[int, str]) -> None:
        self.name, self.url, self._source, self._hashes = name, url, source, hashes
        self._next_step = itertools.count(1)

    def run(self, command: str) -> str:
        """Return the URL of the run that a command writes."""
        return f"{self.url}/{command}"

    def words(self, command: str, step: int) -> list[str]:
        """Return the command line that makes a step of the source in this place, or prunes up to it."""
        run, source = self.run(command), f"{self._source}/step-{step:09d}"
        ckptkit = [sys.executable, "-m", "ckptkit"]
        return {
            "save": [sys.executable, "-c", SAVE, run, str(step)],
            "copy": [*ckptkit, "copy", source, run],
            "reshard": [*ckptkit, "reshard", source, run, "--dp", "2"],
            "prune": [*ckptkit, "prune", run, "--keep-last", "1"],
        }[command]

    def prepare(self, command: str) -> int:
        """Return the step of the next round; a prune gets steps to delete."""
        step = next(self._next_step)
        if command == "prune":
            storage = open_storage(self.run(command))
            for step in itertools.islice(self._next_step, STEPS_A_PRUNE):
                with CheckpointReader(open_storage(self._source), step) as reader:
                    copy_step(reader, storage)
        return step

    def faults(self, command: str, step: int) -> list[str]:
        """Return what is wrong with a run after a round."""
        storage = open_storage(self.run(command))
        steps = committed_steps(storage)
        faults = [] if step in steps else [f"step {step} is not committed"]
        if command == "prune" and steps != [step]:
            faults.append(f"steps {steps} are committed, not {step} alone")
        return faults + [fault for each in steps if each == step for fault in self._damage(storage, each)]

    def remains(self, command: str) -> list[str]:
        """Return what is wrong with a run after its last prune."""
        run = self.run(command)
        swept = subprocess.run(
            [sys.executable, "-m", "ckptkit", "prune", run, "--orphans-older-than", "0s"],
            capture_output=True,
            text=True,
            check=False,
        )
        faults = [] if swept.returncode == 0 else [f"prune: {swept.stderr.strip()}"]
        storage = open_storage(run)
        named = set[str]()
        for step in committed_steps(storage):
            with CheckpointReader(storage, step) as reader:
                keys = ["root.json", *(key for part in reader.root.parts for key in (part.data, part.index))]
            named |= {f"step-{step:09d}/{key}" for key in keys}
            faults += self._damage(storage, step)
        found = _files(run) if self.name == "local" else {item.key for item in storage.list()}
        faults += [f"{key} is left" for key in sorted(found - named)]
        faults += [f"{key} is missing" for key in sorted(named - found)]
        faults += [f"an unfinished upload of {key} is left" for key in abort_stale_uploads(storage, older_than_s=0.0)]
        return faults

    def _damage(self, storage: Storage, step: int) -> list[str]:
        with CheckpointReader(storage, step) as reader:
            found = [f"step {step}: {fault}" for fault in verify_checkpoint(reader).faults]
        with CheckpointReader(storage, step) as reader:
            same = found or hash_checkpoint(reader).all == self._hashes[step]
        return found if same else [f"step {step} has another hash than its source"]


def kill_all(folder: Path, arguments: argparse.Namespace) -> int:
    """Run all rounds, print their table and return the exit code."""
    pairs = list(itertools.product(arguments.commands, arguments.places))
    most = arguments.rounds * 2  # some commands end before they are killed
    rounds = -(-most // len(pairs)) + 1  # and one that is not killed
    source = str(folder / "source")
    num_steps = rounds * (len(arguments.commands) + STEPS_A_PRUNE)
    hashes = make_source(source, num_steps)
    urls = {"local": str(folder / "local"), "s3": "s3://test/kill"}
    places = {name: Place(name, urls[name], source, hashes) for name in arguments.places}
    tallies = {pair: Tally() for pair in pairs}
    rng = random.Random(arguments.seed)
    print(f"seed {arguments.seed}, {arguments.rounds} kills, {os.cpu_count()} cores", flush=True)
    started = time.monotonic()
    lives = {(command, name): live(places[name], command) for command, name in pairs}
    for command, name in itertools.islice(itertools.cycle(pairs), most):
        if sum(tally.killed for tally in tallies.values()) == arguments.rounds:
            break
        life, tally = lives[command, name], tallies[command, name]
        kill_once(places[name], command, life.moment(rng), tally, command_only=rng.random() < 1 / 3)
    faulty = 0
    print(f"{'command':<9}{'place':<7}{'life':>7}{'killed':>8}{'ended before':>14}{'faults':>8}")
    for (command, name), tally in tallies.items():
        tally.faults += places[name].remains(command)
        faulty += len(tally.faults)
        life_s = f"{lives[command, name].end_s:.1f} s"
        print(f"{command:<9}{name:<7}{life_s:>7}{tally.killed:>8}{tally.too_late:>14}{len(tally.faults):>8}")
        for fault in tally.faults:
            print(f"    {fault}")
    print(f"{faulty} faults (target 0) in {time.monotonic() - started:.0f} s")
    arguments.record.add(
        "faults after commands were killed at random moments and run again", faulty, f"in {arguments.rounds} kills"
    )
    return 1 if faulty else 0


def kill_once(place: Place, command: str, seconds: float, tally: Tally, *, command_only: bool) -> None:
    """One round: killed after some seconds, run again, checked."""
    step = place.prepare(command)
    words = place.words(command, step)
    others = kill_after(words, seconds, command_only=command_only)
    tally.killed += others is not None
    tally.too_late += others is None
    again = subprocess.run(words, capture_output=True, text=True, check=False)
    if again.returncode:
        tally.faults.append(f"after a kill at {seconds:.2f} s: {again.stderr.strip()[-500:]}")
    wait_until_gone(others or [])
    tally.faults += place.faults(command, step)


def live(place: Place, command: str) -> Life:
    """Run a command that nobody kills."""
    step = place.prepare(command)
    storage, done = open_storage(place.run(command)), threading.Event()
    before, changed_s = set(storage.list_keys()), list[float]()
    started = time.monotonic()

    def watch() -> None:
        while not done.wait(0.01) and not changed_s:
            now = _files(place.run(command)) if place.name == "local" else set(storage.list_keys())
            if now != before:
                changed_s.append(time.monotonic() - started)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        subprocess.run(place.words(command, step), check=True, capture_output=True)
    finally:
        end_s = time.monotonic() - started
        done.set()
        watching.join()
    assert not place.faults(command, step), place.faults(command, step)
    return Life(min([*changed_s, end_s]), end_s)


def make_source(url: str, num_steps: int) -> dict[int, str]:
    """Save as many steps of a run as two ranks; their hashes."""
    save_steps(url, range(1, num_steps + 1))
    hashes = {}
    for step in range(1, num_steps + 1):
        with CheckpointReader(open_storage(url), step) as reader:
            hashes[step] = hash_checkpoint(reader).all
    return hashes


def save(url: str, step: int) -> int:
    """Save one step unless it is committed, as a job that begins again does; the exit code."""
    storage = open_storage(url)
    if step not in committed_steps(storage):
        save_steps(url, [step])
    return 0 if step in committed_steps(storage) else 1


def save_steps(url: str, steps: Sequence[int]) -> None:
    """Save steps as the ranks of one job; another job may be first."""
    attempt = secrets.token_hex(4)
    ranks = [Checkpointer(url, rank=rank, world_size=2, attempt=attempt) for rank in range(2)]
    for step in steps:
        for rank, checkpointer in enumerate(ranks):
            box = Box((rank * ROWS // 2, 0), (ROWS // 2, 1024))
            size = box.shape[0] * box.shape[1]
            pieces = [Piece(info.name, box, 0, size, np.full(size, step + rank, np.float32)) for info in TENSORS]
            checkpointer.save(
                step, pieces, tensors=TENSORS, layout=LAYOUT, num_layers=len(TENSORS), metadata={"step": step}
            )
        for checkpointer in ranks:
            checkpointer.wait()
    for checkpointer in ranks:
        checkpointer.close()


def _files(run: str) -> set[str]:
    """Return all that is in a local folder but folders that hold something; an empty one ends in "/"."""
    names = set()
    for folder, folders, files in os.walk(run):
        inside = os.path.relpath(folder, run)
        names |= {os.path.normpath(f"{inside}/{name}") for name in files}
        if not folders and not files:
            names.add(f"{inside}/")
    return names


if __name__ == "__main__":
    sys.exit(main_of(__doc__, COMMANDS, kill_all))
