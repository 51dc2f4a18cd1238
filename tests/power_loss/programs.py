"""Programs whose every state after a loss of power is looked at: python -m tests.power_loss.programs NAME FOLDER.

Each begins with a folder that is durable, does one thing to a run or a store in it, and says what it was promised:
"whole N" is a step that must load from then on, "gone N" one that must not come back, "store" one that must read.
"""

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path

import numpy as np

from ckptkit.format.keys import Seat
from ckptkit.loading.reader import CheckpointReader
from ckptkit.model.layout import ParallelLayout
from ckptkit.rewrite.copy import copy_step
from ckptkit.rewrite.reshard import reshard
from ckptkit.runs.catalogue import committed_steps
from ckptkit.runs.pruning import prune, remove
from ckptkit.runs.retention import Retention
from ckptkit.runs.rollback import rollback, undo_rollback
from ckptkit.saving.checkpointer import Checkpointer
from ckptkit.saving.options import CheckpointerOptions
from datakit import TokenStore, train_tokenizer, verify, write_store
from datakit.cli import main as datakit_main
from tests.ckptkit.support.saves import SMALL, assert_holds, save_one
from tests.ckptkit.support.small_steps import save_rank
from tests.power_loss.folder_programs import FOLDER_PROGRAMS
from tests.power_loss.program import LAYOUT, Program, be_host, saved, say, step_fault
from tests.support.checks import require
from threefold.errors import UserError
from threefold.storage import open_storage

DOCUMENTS = [np.arange(start, start + 40) for start in range(0, 200, 40)]


def save_as(layout: ParallelLayout) -> Callable[[Path], None]:
    """Return what saves two steps by the writers of a layout at once, each of which learns of the commit."""
    num_writers = layout.world_size

    def work(folder: Path) -> None:
        storage = open_storage(str(folder / "run"))

        def save(step: int, rank: int) -> None:
            be_host(f"writer {rank}")
            seat = Seat(storage.address, step, "a", rank, num_writers)
            save_rank(storage, seat, layout, step, patience_s=lambda _: 20.0)
            say(f"whole {step}")

        with ThreadPoolExecutor(num_writers) as pool:
            for step in (1, 2):
                list(pool.map(save, [step] * num_writers, reversed(range(num_writers))))

    return work


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


def pruned(folder: Path) -> None:
    """Delete all steps but the newest."""
    prune(open_storage(str(folder / "run")), Retention(keep_last=1))
    say("pruned")


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


def stored(folder: Path) -> None:
    """Write a token store of documents."""
    write_store(folder / "store", DOCUMENTS, vocab_size=1000)
    say("reads store")


def texts(folder: Path) -> None:
    """Make a text and a tokenizer for it."""
    lines = [json.dumps({"text": f"the quick brown fox {number} jumps"}) for number in range(12)]
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n")
    train_tokenizer([str(folder / "a.jsonl")], str(folder / "tok.json"), vocab_size=300)


def datakit(*words: object) -> Callable[[Path], None]:
    """Return what runs a verb in a folder, and promises that the store that is its last word reads."""

    def work(folder: Path) -> None:
        paths = [str(folder / word) if isinstance(word, Path) else str(word) for word in words]
        said = StringIO()
        with redirect_stdout(said), redirect_stderr(said):
            code = datakit_main(paths)
        require(code == 0, said.getvalue())
        say(f"reads {words[-1]}")

    return work


def preprocessed(folder: Path) -> None:
    """Have a text, and a store of it."""
    texts(folder)
    PREPROCESS(folder)


def archived(folder: Path) -> None:
    """Have a store, and an archive of it."""
    preprocessed(folder)
    ARCHIVE(folder)


PREPROCESS = datakit("preprocess", Path("a.jsonl"), "--tokenizer", Path("tok.json"), "--output", Path("store"))
MERGE = datakit("merge", Path("store"), Path("store"), "--output", Path("merged"))
ARCHIVE = datakit("archive", Path("store"), "--output", Path("archive"))
UNARCHIVE = datakit("unarchive", Path("archive"), "--output", Path("unpacked"))
PACK = datakit("pack", Path("store"), "--seq-length", 16, "--output", Path("packed"))


def opened(path: Path) -> TokenStore:
    """Open a store, or an archive with a cache of its own."""
    if path.name != "archive":
        return TokenStore.open(path)
    cache = path.parent.with_name("cache")
    shutil.rmtree(cache, ignore_errors=True)
    return TokenStore.open(path.as_uri(), cache=cache)


def store_fault(folder: Path, promises: Sequence[str]) -> str:
    """Return what is wrong with stores: other tokens, or one that was promised and of which a file is not sound."""
    whole: list[int] = []
    for name in ("store", "archive", "unpacked", "merged"):
        place = folder / name
        try:
            store = opened(place)
            tokens = store.tokens(0, store.num_tokens).tolist()
            if f"reads {name}" in promises and (damage := verify(place)):
                return f"{name} was promised and is damaged: {damage[0]}"
        except UserError as error:
            if f"reads {name}" in promises:
                return f"{name} was promised: {type(error).__name__}"
            continue
        whole = whole or tokens
        if not tokens or tokens != (2 * whole if name == "merged" else whole):
            return f"{name} has other tokens"
    return ""


FOUR, EIGHT = ParallelLayout(tp=2, pp=2), ParallelLayout(tp=4, pp=2)
RUN, COPIES = ("run",), ("run", "copies")
PROGRAMS = {
    "save": Program(save_as(LAYOUT), step_fault, is_repeatable=False),
    "four writers": Program(save_as(FOUR), partial(step_fault, layout=FOUR), is_repeatable=False),
    "eight writers": Program(save_as(EIGHT), partial(step_fault, layout=EIGHT), is_repeatable=False),
    "checkpointer": Program(save_in_the_background, newest_fault, is_repeatable=False),
    "prune": Program(pruned, step_fault, saved(1, 2, 3), ("whole 3",), runs=RUN),
    "remove": Program(removed, step_fault, saved(1, 2, 3), ("whole 1", "whole 3"), is_repeatable=False),
    "rollback": Program(rolled_back, rollback_fault, saved(1, 2), ("whole 1",), is_repeatable=False),
    "undo": Program(brought_back, step_fault, saved(1, 2, then=rolled_back), ("whole 1",), is_repeatable=False),
    "copy": Program(copied, copy_fault, saved(1), runs=COPIES),
    "reshard": Program(resharded, copy_fault, saved(1), runs=COPIES),
    "store": Program(stored, store_fault, is_repeatable=False),
    "preprocess": Program(PREPROCESS, store_fault, texts),
    "merge": Program(MERGE, store_fault, preprocessed, ("reads store",)),
    "archive": Program(ARCHIVE, store_fault, preprocessed, ("reads store",)),
    "unarchive": Program(UNARCHIVE, store_fault, archived, ("reads store", "reads archive")),
    **FOLDER_PROGRAMS,
}


if __name__ == "__main__":
    PROGRAMS[sys.argv[1]].work(Path(sys.argv[2]))
