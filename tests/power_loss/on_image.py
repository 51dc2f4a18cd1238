"""Cut the power of a real file system while a program writes to it, mount what is left, and look at it.

    python -m tests.power_loss.on_image --file-system xfs --cuts 500    # as root

A program of programs.py runs on ext4 or XFS, on a disk whose writes and flushes are logged. At random moments of it the
writes that no flush covers are lost at random, each block by itself, some of them to a part of their sectors. What is
left is mounted, which replays the journal, and must hold what had been promised; the same work must end well on it.
The last cut of each run is when it has ended. Prints one line of JSON.

With --without, fsyncs whose callers hold some text are left out, and something should be lost; with --no-flush, the
disk acknowledges flushes and may lose what they covered as well.
"""

import argparse
import importlib
import io
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from tests.power_loss.exploring import ROOT, fault_of
from tests.power_loss.program import Program
from tests.power_loss.programs import PROGRAMS
from threefold.errors import UserError
from tools.power_loss.block_log import BlockLog, read_log
from tools.power_loss.calls import STACKS
from tools.power_loss.disk import tree_of
from tools.power_loss.mounted import (
    FILE_SYSTEMS,
    SCRATCH,
    copy_image,
    in_namespace,
    is_repaired,
    lay,
    logged,
    make_image,
    mounted,
    obstacle,
)
from tools.power_loss.states import AGE_S

CUTS_OF_A_RUN = 8
CHECK_S = 120.0
EMPTY, LIVE, LOG, DISK, SURE, CUT = (SCRATCH / name for name in ("empty", "live", "log", "disk", "sure", "cut"))
MOUNT = SCRATCH / "mount"
FOLDER = MOUNT / "disk"  # that the program writes to
FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Options:
    """On which disk programs run, and what of them is left out."""

    kind: str
    flushes: bool = True
    without: str = ""


@dataclass
class Verdict:
    """How many cuts were looked at, of which programs, and what was wrong with some."""

    file_system: str
    cuts: int = 0
    runs: int = 0
    cuts_that_lost: int = 0  # a block or a part of one
    promises: int = 0
    repaired: int = 0  # as the file system could not be mounted
    not_mounted: int = 0  # nor after that
    faults: Counter[str] = field(default_factory=Counter)
    programs: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


@dataclass(frozen=True)
class ImageRun:
    """A program that ran on a disk: the log of that, and the names that it left."""

    name: str
    log: BlockLog
    left: frozenset[str]

    @property
    def program(self) -> Program:
        """What ran."""
        return PROGRAMS[self.name]


def run_on_image(name: str, options: Options, rng: random.Random) -> ImageRun:
    """Let a program run on an empty file system, from a moment on at which all is durable that it begins with."""
    copy_image(EMPTY, LIVE)
    LOG.unlink(missing_ok=True)
    size = EMPTY.stat().st_size
    with logged(LIVE, LOG, DISK), mounted(DISK, size, MOUNT):
        FOLDER.mkdir()
        if error := in_child(lambda: begin(PROGRAMS[name])):
            raise UserError(f"{name}: {error}")
        subprocess.run(["sync", "-f", FOLDER], check=True)
        first = len(read_log(LOG))
        environment = os.environ | {"PYTHONPATH": str(STACKS), "POWER_LOSS_WITHOUT": options.without}
        with DISK.open("r+b") as said, writing_back(rng):
            said.seek(size)
            command = [sys.executable, "-m", "tests.power_loss.programs", name, FOLDER]
            subprocess.run(command, cwd=ROOT, stdout=said, env=environment, check=True)
        last = len(read_log(LOG))
        left = frozenset(tree_of(FOLDER))
    return ImageRun(name, BlockLog(read_log(LOG), first, last), left)


def begin(program: Program) -> str:
    """Make what a program begins with."""
    with redirect_stdout(io.StringIO()):
        program.begin(FOLDER)
    return ""


@contextmanager
def writing_back(rng: random.Random) -> Iterator[None]:
    """Let the machine write back what it has, at random moments in every second run; else by itself."""
    if rng.random() < 0.5:
        yield
        return
    ended, pauses = threading.Event(), random.Random(rng.random())

    def write_back() -> None:
        while not ended.wait(pauses.uniform(0.001, 0.1)):
            subprocess.run(["sync", "-f", FOLDER], check=True)

    thread = threading.Thread(target=write_back)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def look_at_cuts(run: ImageRun, places: Sequence[int], options: Options, rng: random.Random, verdict: Verdict) -> None:
    """Cut the power at places of a run's log, in their order, and count what is wrong with what is left."""
    copy_image(EMPTY, SURE)
    log, done = run.log, 0
    for place in places:
        sure = log.sure(place) if options.flushes else log.begin
        lay(log, done, sure, SURE)
        done = sure
        copy_image(SURE, CUT)
        survivors = list(log.survivors(sure, place, rng))
        with CUT.open("r+b") as image:
            for offset, data in survivors:
                image.seek(offset)
                image.write(data)
        promises = log.promises(place)
        written = sum(len(entry.data) for entry in log.writes(sure, place))
        verdict.cuts += 1
        verdict.programs[run.name] += 1
        verdict.promises += len(promises)
        verdict.cuts_that_lost += written > sum(len(data) for _, data in survivors)
        fault = fault_after(run, promises, verdict)
        if fault:
            verdict.faults[f"{run.name}: {fault}"] += 1


def fault_after(run: ImageRun, promises: Sequence[str], verdict: Verdict) -> str:
    """Mount what a cut left, repaired if it must be, and return what is wrong with it."""
    with suppress(UserError):
        return fault_mounted(run, promises)
    verdict.repaired += is_repaired(verdict.file_system, CUT)
    try:
        return fault_mounted(run, promises)
    except UserError as error:
        verdict.not_mounted += 1
        return f"not mounted: {error}"


def fault_mounted(run: ImageRun, promises: Sequence[str]) -> str:
    """Return what is wrong with what a cut left; UserError if it cannot be mounted."""
    with mounted(CUT, EMPTY.stat().st_size, MOUNT):
        return in_child(lambda: fault_in(run, promises))


def fault_in(run: ImageRun, promises: Sequence[str]) -> str:
    """Return what is wrong with the folder, as it is after two days."""
    try:
        then = time.time() - AGE_S
        for path in (*FOLDER.rglob("*"), FOLDER):
            os.utime(path, (then, then))
        return fault_of(run.program, run.left, FOLDER, promises)
    except OSError as error:
        return f"the file system has an error: {os.strerror(error.errno or 0)}"


def in_child(act: Callable[[], str]) -> str:
    """Return what a function returns in a process of its own, so that nothing of the disk stays open."""

    def answer(to: Connection) -> None:
        os.setsid()
        try:
            to.send(act())
        except BaseException as error:
            to.send(f"{type(error).__name__}: {error}")
            raise

    here, there = FORK.Pipe(duplex=False)
    child = FORK.Process(target=answer, args=(there,))
    child.start()
    there.close()
    try:
        text = here.recv() if here.poll(CHECK_S) else "it does not end"
    except EOFError:
        text = "the process died"
    with suppress(ProcessLookupError):
        os.killpg(child.pid or 0, signal.SIGKILL)  # with what it started
    child.join()
    return str(text)


def look(names: Sequence[str], options: Options, num_cuts: int, seed: int) -> Verdict:
    """Run programs in turn, each cut some times, until there were as many cuts."""
    verdict, began = Verdict(options.kind), time.monotonic()
    if "torch" in names:
        importlib.import_module("ckptkit.torch")  # once, and not in the process of each check
    make_image(options.kind, EMPTY)
    while verdict.cuts < num_cuts:
        rng = random.Random(f"{seed} {verdict.runs}")
        run = run_on_image(names[verdict.runs % len(names)], options, rng)
        verdict.runs += 1
        count = min(CUTS_OF_A_RUN, num_cuts - verdict.cuts)
        places = [*sorted(rng.randint(run.log.begin + 1, run.log.end) for _ in range(count - 1)), run.log.end]
        look_at_cuts(run, places, options, rng, verdict)
    verdict.seconds = round(time.monotonic() - began, 1)
    return verdict


def main() -> int:
    """Look at cuts on one file system and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="PROGRAM", help=f"of {', '.join(PROGRAMS)}; all without one")
    parser.add_argument("--file-system", choices=sorted(FILE_SYSTEMS), default="ext4")
    parser.add_argument("--cuts", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--without", default="", metavar="CALLER", help="leave out the fsyncs of such a caller")
    parser.add_argument(
        "--no-flush", action="store_true", help="of a disk that acknowledges a flush and does not do it"
    )
    arguments = parser.parse_args()
    reason = obstacle(arguments.file_system)
    if reason:
        raise SystemExit(reason)
    in_namespace("tests.power_loss.on_image", sys.argv[1:])
    options = Options(arguments.file_system, not arguments.no_flush, arguments.without)
    print(json.dumps(vars(look(arguments.names or [*PROGRAMS], options, arguments.cuts, arguments.seed))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
