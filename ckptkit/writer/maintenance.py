"""Maintenance: what a writer does for a place besides saving to it: stripes, pruning, aborting stale uploads."""

import traceback
from collections.abc import Collection

from ckptkit.io.striping import Striper
from ckptkit.runs.debris import abort_uploads
from ckptkit.runs.pruning import Pruner
from ckptkit.runs.retention import Retention
from threefold.errors import UserError
from threefold.storage import open_storage


class Maintenance:
    """Keeps one place in order; what goes wrong fails no save, and is a warning that is reported once.

    Of the writer process: made before the first save, one for each place, and used by that place's thread alone. The
    writer that leads aborts the unfinished uploads under the run's URL that are older than any save.
    """

    def __init__(self, url: str, *, leads: bool, stripe_count: int = 0, stripe_size_bytes: int = 0) -> None:
        self._url = url
        self._warnings: list[str] = []
        self._pruner = Pruner()
        self.striper = Striper(stripe_count, stripe_size_bytes, self._warnings.append)
        if leads:
            try:
                abort_uploads(open_storage(url))
            except UserError as error:
                self._warnings.append(str(error))
            except Exception as error:  # of a client library, or ours
                traceback.print_exc()
                self._warnings.append(f"stale uploads were not aborted: {type(error).__name__}: {error}")

    def prune(self, step: int, retention: Retention, needed: Collection[int] = ()) -> None:
        """Delete what is not to be kept once a step is committed, but no step that is still `needed`."""
        warning = self._pruner.after_save(open_storage(self._url), step, retention, needed=needed)
        if warning:
            self._warnings.append(warning)

    def take_warning(self) -> str:
        """Return what is to be reported and was not yet."""
        found = "; ".join(self._warnings)
        self._warnings.clear()
        return found
