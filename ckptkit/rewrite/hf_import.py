"""Import: a Hugging Face folder as one committed step of a run, in one pass and bounded memory.

The name of the attempt follows from the folder's files, so a run that was killed is repeated with the same keys and
the same bytes. The values are those of the folder, bit for bit.
"""

from collections.abc import Callable

from ckptkit.foreign.hf_folder import HfFolder
from ckptkit.format.keys import ROOT_KEY
from ckptkit.format.root import attempt_of_head
from ckptkit.loading.roots import root_info
from ckptkit.model.layout import ParallelLayout
from ckptkit.rewrite.reshard import ReshardReport, reshard
from ckptkit.runs.temporaries import temporaries
from threefold.storage import Storage


def import_folder(
    folder: HfFolder,
    storage: Storage,
    *,
    step: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
    dry_run: bool = False,
) -> ReshardReport:
    """Write a folder into a run as a step, its placements set so that any layout can load it, and commit it.

    UserError if the step is there already, unless the same call made it. With `dry_run` all is checked, nothing is
    written.
    """
    with folder.open(step) as reader:
        if not dry_run and root_info(storage, step) is None:
            _remove_leftovers(storage, step, folder.attempt)
        return reshard(
            reader, storage, ParallelLayout(), step=step, attempt=folder.attempt, progress=progress, dry_run=dry_run
        )


def _remove_leftovers(storage: Storage, step: int, attempt: str) -> None:
    """Remove the hidden files of an import of the same folder that was killed."""
    for each in temporaries(storage, step):
        is_root = each.key == ROOT_KEY and attempt_of_head(storage.read(each.hidden_key)) == attempt
        if is_root or each.key.startswith(f"{attempt}/"):
            storage.delete([each.hidden_key])
