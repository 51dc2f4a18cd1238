"""Record a program, and look at all that a loss of power may leave of it."""

import io
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ckptkit.runs.pruning import prune
from ckptkit.runs.retention import Retention
from tests.power_loss.programs import PROGRAMS, Program
from tests.support.checks import require_equal
from threefold.errors import UserError
from threefold.storage import open_storage
from tools.power_loss.calls import ACKNOWLEDGED, record
from tools.power_loss.disk import Recording, replay, tree_of
from tools.power_loss.states import Tally, explore

ROOT = Path(__file__).parents[2]
IN_MEMORY = Path("/dev/shm")
EVERYTHING = Retention(keep_last=99)


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
        seen: set[bytes] | None = None,
    ) -> Tally:
        """Check all states, of the program as it is or without one use of fsync, but for trees that were seen."""
        recording = self.recording.without(without) if without else self.recording
        check = partial(fault_of, self.program, self.left)
        return explore(
            recording, model, check, self.folder, num_random=num_random, stops_at_fault=stops_at_fault, seen=seen
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
        require_equal(recording.tree(range(len(recording.changes))), after)
        yield Recorded(program, recording, folder, frozenset(after))


def fault_of(program: Program, left: frozenset[str], folder: Path, promises: Sequence[str]) -> str:
    """Return what is wrong with a folder, or with what the same work makes of it, or leaves in it besides `left`."""
    promised = (*program.promised, *promises)
    fault = program.fault_of(folder, promised)
    if fault or not program.is_repeatable:
        return fault
    output = io.StringIO()
    try:
        with redirect_stdout(output):
            program.work(folder)
    except (UserError, AssertionError) as error:
        return f"once more: {type(error).__name__}"
    lines = [line.encode() for line in output.getvalue().splitlines()]
    again = [line.removeprefix(ACKNOWLEDGED).decode() for line in lines if line.startswith(ACKNOWLEDGED)]
    if fault := program.fault_of(folder, (*promised, *again)):
        return f"once more: {fault}"
    for run in program.runs:
        prune(open_storage(str(folder / run)), EVERYTHING)  # what broke off is removed once it is a day old
    debris = sorted(tree_of(folder).keys() - left)
    return f"once more: {debris[0]} is left" if debris else ""
