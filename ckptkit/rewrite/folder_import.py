"""Import: a folder of another program as one committed step of a run, in one pass and bounded memory.

The name of the attempt follows from the folder's files, so a run that was killed is repeated with the same keys and
the same bytes. On a local disk one process at a time writes an attempt: it holds a lock of the attempt's folder, which
ends with it. The values are those of the folder, bit for bit.
"""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from typing import Protocol

from ckptkit.format.keys import step_folder
from ckptkit.loading.reader import CheckpointReader
from ckptkit.loading.roots import root_info
from ckptkit.model.layout import ParallelLayout
from ckptkit.rewrite.reshard import ReshardReport, reshard
from threefold.errors import UserError
from threefold.storage import Storage
from threefold.storage.folders import Folder, local_root
from threefold.storage.local import local_failures


class ForeignFolder(Protocol):
    """A folder that has the face of a run of one step."""

    @property
    def attempt(self) -> str:
        """The name that every import of this folder, as it is now, has on a run's storage."""

    def open(self, step: int) -> CheckpointReader:
        """Return a reader of it as a step, for a `with`."""


def import_folder(
    folder: ForeignFolder,
    storage: Storage,
    *,
    step: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
    dry_run: bool = False,
) -> ReshardReport:
    """Write a folder into a run as a step, its placements set so that any layout can load it, and commit it.

    UserError if the step is there already, unless the same call made it, or if another process is making it. With
    `dry_run` all is checked, nothing is written.
    """
    with contextlib.ExitStack() as stack:
        reader = stack.enter_context(folder.open(step))
        if not dry_run and root_info(storage, step) is None:
            stack.enter_context(_claimed(storage, f"{step_folder(step)}/{folder.attempt}"))
        return reshard(reader, storage, ParallelLayout(), step=step, progress=progress, dry_run=dry_run)


@contextlib.contextmanager
def _claimed(storage: Storage, inner: str) -> Iterator[None]:
    """Hold a folder of a local disk; UserError if another process does. Where there are no locks, nothing is held.

    Of the folders that this makes those stay that hold something at the end.
    """
    root = local_root(storage)
    if root is None:
        yield
        return
    made = [each for each in (root / inner, root / os.path.dirname(inner), root) if not each.exists()]
    with local_failures("lock", root / inner), Folder(root, inner, make=True) as folder:
        held = folder.open(".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                text = f"another process imports the same folder into {storage.url}/{inner}"
                raise UserError(text, hint="wait until it ends, then run this again") from None
        yield
    finally:
        os.close(held)
        for each in made:
            with contextlib.suppress(OSError):
                each.rmdir()
