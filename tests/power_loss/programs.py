"""Programs whose every state after a loss of power is looked at: python -m tests.power_loss.programs NAME FOLDER.

Each begins with a folder that is durable, does one thing to a run or a store in it, and says what it was promised:
"whole N" is a step that must load from then on, "gone N" one that must not come back, "store" one that must read.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from ckptkit.loading.reader import CheckpointReader
from ckptkit.model.layout import ParallelLayout
from ckptkit.rewrite.copy import copy_step
from ckptkit.rewrite.reshard import reshard
from ckptkit.runs.catalogue import committed_steps
from ckptkit.runs.pruning import remove
from ckptkit.runs.retention import Retention
from ckptkit.runs.rollback import rollback, undo_rollback
from ckptkit.saving.checkpointer import Checkpointer
from ckptkit.saving.options import CheckpointerOptions
from tests.ckptkit.support.saves import SMALL, assert_holds, save_one
from tests.power_loss.folder_programs import FOLDER_PROGRAMS
from tests.power_loss.program import Program, saved, say, step_fault
from tests.power_loss.store_programs import STORE_PROGRAMS
from tests.power_loss.writer_programs import WRITER_PROGRAMS
from threefold.errors import UserError
from threefold.storage import open_storage


def save_in_the_background(folder: Path) -> None:
    """Save three steps as a training program does, of which one is kept."""
    options = CheckpointerOptions(60.0, retention=Retention(keep_last=1))
    with Checkpointer(str(folder / "run"), attempt="a", options=options) as checkpointer:
        for step in (1, 2, 3):
            save_one(checkpointer, step, SMALL, scale=step)
            if all(report.ok for report in checkpointer.wait()):
                say(f"newest {step}")


def copy_fault(folder: Path, promises: Sequence[str]) -> str:
    """Return what is wrong with a run, which stays, or with its copy."""
    return step_fault(folder, ("whole 1",)) or step_fault(folder, promises, "copies")


def newest_fault(folder: Path, promises: Sequence[str]) -> str:
    """Return what is wrong with a run of which the newest step that was promised, or a later one, must load."""
    storage = open_storage(str(folder / "run"))
    steps = committed_steps(storage) if (folder / "run").exists() else []
    newest = max((int(text.split()[1]) for text in promises), default=0)
    for step in steps:
        try:
            assert_holds(str(folder / "run"), step, SMALL, scale=step)
        except (UserError, AssertionError) as error:
            return f"step {step} is committed: {type(error).__name__}"
    return "" if not newest or max(steps, default=0) >= newest else f"step {newest} was promised, and nothing is newer"


def copied(folder: Path) -> None:
    """Copy a step into another run."""
    with CheckpointReader(open_storage(str(folder / "run")), 1) as source:
        copy_step(source, open_storage(str(folder / "copies")))
    say("whole 1")


def resharded(folder: Path) -> None:
    """Reshard a step into another run."""
    with CheckpointReader(open_storage(str(folder / "run")), 1) as source:
        reshard(source, open_storage(str(folder / "copies")), ParallelLayout(pp=2))
    say("whole 1")


def removed(folder: Path) -> None:
    """Remove a step by its number."""
    remove(open_storage(str(folder / "run")), [2])
    say("gone 2")


def rollback_fault(folder: Path, promises: Sequence[str]) -> str:
    """Return what is wrong with a run that went back, or that cannot undo it."""
    fault = step_fault(folder, promises)
    if not fault and "gone 2" in promises:
        undo_rollback(open_storage(str(folder / "run")), 1)
        fault = step_fault(folder, ("whole 1", "whole 2"))
        rollback(open_storage(str(folder / "run")), 1)
    return fault


def rolled_back(folder: Path) -> None:
    """Go back to a step, so that the next run begins there."""
    rollback(open_storage(str(folder / "run")), 1)
    say("gone 2")


def brought_back(folder: Path) -> None:
    """Take a rollback back."""
    undo_rollback(open_storage(str(folder / "run")), 1)
    say("whole 2")


COPIES = ("run", "copies")
PROGRAMS = {
    **WRITER_PROGRAMS,
    "checkpointer": Program(save_in_the_background, newest_fault, is_repeatable=False),
    "remove": Program(removed, step_fault, saved(1, 2, 3), ("whole 1", "whole 3"), is_repeatable=False),
    "rollback": Program(rolled_back, rollback_fault, saved(1, 2), ("whole 1",), is_repeatable=False),
    "undo": Program(brought_back, step_fault, saved(1, 2, then=rolled_back), ("whole 1",), is_repeatable=False),
    "copy": Program(copied, copy_fault, saved(1), runs=COPIES),
    "reshard": Program(resharded, copy_fault, saved(1), runs=COPIES),
    **STORE_PROGRAMS,
    **FOLDER_PROGRAMS,
}


if __name__ == "__main__":
    PROGRAMS[sys.argv[1]].work(Path(sys.argv[2]))
