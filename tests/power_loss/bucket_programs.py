"""Programs on an object store whose every request may fail, be answered late or never, or be the last.

Those of `programs` that need no folder are the same there. Two writers take turns here, the first one last.
"""

import tempfile
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from ckptkit.format.keys import Seat
from ckptkit.writer.commit import await_commit
from datakit import TokenStore, write_store
from datakit.cli import main as datakit_main
from tests.ckptkit.support.small_steps import save_rank
from tests.power_loss.folder_programs import FOLDER_PROGRAMS
from tests.power_loss.program import LAYOUT, Program, say, step_fault
from tests.power_loss.programs import PROGRAMS
from tests.power_loss.store_programs import DOCUMENTS
from tests.support.checks import require
from threefold.errors import UserError
from threefold.storage import AlreadyExists, open_storage

RUN = ("run",)


def save_in_turn(place: Any) -> None:
    """Save a step by two writers, at the second try if need be; the other one learns of the commit.

    A step that is there already is a promise too.
    """
    storage = open_storage(str(place / "run"))
    for attempt in "ab" if place.times == 1 else "cd":
        seats = [Seat(storage.address, 1, attempt, rank, 2) for rank in (1, 0)]
        try:
            for seat in seats:
                save_rank(storage, seat, LAYOUT, 1, awaits_commit=False)
        except AlreadyExists:
            say("whole 1")
            return
        except UserError:
            continue
        say("whole 1")
        await_commit(storage, seats[0], lambda: -1.0)
        return


def local_store() -> Path:
    """Make a store on this machine's disk, once."""
    store = Path(tempfile.gettempdir(), "of-a-bucket")
    if not store.exists():
        write_store(store, DOCUMENTS, vocab_size=1000)
    return store


def archived(place: Any) -> None:
    """Write an archive of a store, which needs no other process."""
    said = StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        code = datakit_main(["archive", str(local_store()), "--output", str(place / "archive"), "--workers", "1"])
    require(code == 0, said.getvalue())
    say("reads archive")


def archive_fault(place: Any, promises: Sequence[str]) -> str:
    """Return what is wrong with an archive: other tokens, or one that was promised and does not read."""
    with tempfile.TemporaryDirectory() as cache:
        try:
            store = TokenStore.open(str(place / "archive"), cache=cache)
            tokens = store.tokens(0, store.num_tokens).tolist()
        except UserError as error:
            return f"it was promised: {type(error).__name__}" if "reads archive" in promises else ""
    return "" if tokens == np.concatenate(DOCUMENTS).tolist() else "it has other tokens"


ON_ANY_STORAGE = ("prune", "remove", "rollback", "undo", "copy", "reshard")
BUCKET_PROGRAMS: dict[str, Program] = {
    "two writers": Program(save_in_turn, step_fault, runs=RUN),
    "pin": FOLDER_PROGRAMS["pin"],
    "unpin": FOLDER_PROGRAMS["unpin"],
    **{name: PROGRAMS[name] for name in ON_ANY_STORAGE},
    "archive": Program(archived, archive_fault),
}
COMPLETE = {  # what each promises at its end
    "two writers": ["whole 1"],
    "pin": ["pinned 1"],
    "unpin": ["unpinned 1"],
    "prune": ["pruned"],
    "remove": ["gone 2"],
    "rollback": ["gone 2"],
    "undo": ["whole 2"],
    "copy": ["whole 1"],
    "reshard": ["whole 1"],
    "archive": ["reads archive"],
}
