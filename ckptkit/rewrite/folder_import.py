"""Import: a folder of another program as one committed step of a run, in one pass and bounded memory.

The name of the attempt follows from the folder's files, so a run that was killed is repeated with the same keys and
the same bytes. The values are those of the folder, bit for bit.
"""

from collections.abc import Callable

from ckptkit.foreign.folder import ForeignFolder
from ckptkit.model.layout import ParallelLayout
from ckptkit.rewrite.reshard import ReshardReport, reshard
from threefold.storage import Storage


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
    with folder.open(step) as reader:
        return reshard(reader, storage, ParallelLayout(), step=step, progress=progress, dry_run=dry_run)
