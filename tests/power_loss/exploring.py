"""Record a program, and look at all that a loss of power may leave of it."""

import io
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ckptkit.runs.pruning import prune
from ckptkit.runs.retention import Retention
from tests.power_loss.programs import PROGRAMS, Program
from tests.support.checks import require
from threefold.errors import UserError
from threefold.storage import open_storage
from tools.power_loss.calls import ACKNOWLEDGED, record
from tools.power_loss.disk import Recording, replay, tree_of
from tools.power_loss.states import Tally, explore

ROOT = Path(__file__).parents[2]
IN_MEMORY = Path("/dev/shm")
ATTEMPT = re.compile(r"(?<=/)[abc](?=/|$)")  # as programs name them
EVERYTHING = Retention(keep_last=99)
AGAIN_EVERY = 10


@dataclass(frozen=True)
class Recorded:
    """A program with what it did to a folder, and the names that it left there."""

    program: Program
    recording: Recording
    folder: Path
    left: frozenset[str]

    def explore(
        self,
        model: str,
        *,
        without: str = "",
        num_random: int = 3,
        stops_at_fault: bool = False,
    ) -> Tally:
        """Check all states of the program as it is, or those that there are only without one use of fsync.

        Where another attempt follows it does so on one tree in AGAIN_EVERY, and on none to find a fault.
        """
        recording = self.recording.without(without) if without else self.recording
        beyond, trees = self.recording if without else None, count()

        def check(folder: Path, promises: Sequence[str]) -> str:
            follows = self.program.again is None or (not without and next(trees) % AGAIN_EVERY == 0)
            return fault_of(self.program, self.left, folder, promises, once_more=follows)

        return explore(
            recording, model, check, self.folder, num_random=num_random, stops_at_fault=stops_at_fault, beyond=beyond
        )


@contextmanager
def recorded(name: str) -> Iterator[Recorded]:
    """Run a program on a fresh folder, in memory if there is room; a replay of its calls must end as it did."""
    program = PROGRAMS[name]
    with tempfile.TemporaryDirectory(dir=IN_MEMORY if IN_MEMORY.is_dir() else None) as scratch:
        folder = Path(scratch, "disk")
        folder.mkdir()
        with redirect_stdout(io.StringIO()):
            program.begin(folder)
        before = tree_of(folder)
        command = [sys.executable, "-m", "tests.power_loss.programs", name, str(folder)]
        recording = replay(record(command, Path(scratch, "calls"), cwd=ROOT), folder, before)
        after = tree_of(folder)
        ends_so = recording.tree(range(len(recording.changes))) == after
        require(ends_so, f"a replay of {name} does not end as it did")
        yield Recorded(program, recording, folder, frozenset(after))


@contextmanager
def in_one_thread() -> Iterator[None]:
    """Let pools of threads do their work where it is given to them: files are small, and threads cost more than they.

    What is read and written is the same, in the order of the calls.
    """

    def submit(_: ThreadPoolExecutor, work: Callable[..., Any], /, *words: Any, **named: Any) -> Future[Any]:
        done = Future[Any]()
        try:
            done.set_result(work(*words, **named))
        except BaseException as error:
            done.set_exception(error)
        return done

    with patch.object(ThreadPoolExecutor, "submit", submit):
        yield


@in_one_thread()
def fault_of(
    program: Program, left: Collection[str], folder: Path, promises: Sequence[str], *, once_more: bool = True
) -> str:
    """Return what is wrong with a folder, or, `once_more`, with what the same work makes of it and leaves there.

    It may leave what is called as one of `left`.
    """
    promised = (*program.promised, *promises)
    fault = program.fault_of(folder, promised)
    if fault or not (once_more and program.is_repeatable):
        return fault
    output = io.StringIO()
    try:
        with redirect_stdout(output):
            (program.again or program.work)(folder)
    except (UserError, AssertionError) as error:
        return f"once more: {type(error).__name__}"
    lines = [line.encode() for line in output.getvalue().splitlines()]
    again = [line.removeprefix(ACKNOWLEDGED).decode() for line in lines if line.startswith(ACKNOWLEDGED)]
    if fault := program.fault_of(folder, (*promised, *again)):
        return f"once more: {fault}"
    for run in program.runs:
        prune(open_storage(str(folder / run)), EVERYTHING)  # what broke off is removed once it is a day old
    debris = sorted(names_of(tree_of(folder)) - names_of(left))
    return f"once more: {debris[0]} is left" if debris else ""


def names_of(paths: Iterable[str]) -> Counter[str]:
    """Return how often each path is there, whichever attempt of a step it is of."""
    return Counter(ATTEMPT.sub("*", path) for path in paths)
