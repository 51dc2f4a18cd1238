"""Maintenance: what a writer does for a place besides saving to it: stripes, pruning, aborting stale uploads."""

import threading
import traceback
from collections.abc import Collection, Sequence

from ckptkit.io.data_files import free_bytes
from ckptkit.io.striping import Striper
from ckptkit.runs.debris import abort_uploads
from ckptkit.runs.pruning import Pruner
from ckptkit.runs.record import StepRecord
from ckptkit.runs.retention import Retention
from threefold.errors import UserError
from threefold.storage import open_storage


class Maintenance:
    """Keeps one place in order; what goes wrong fails no save, and is a warning that is reported once.

    Of the writer process: made before the first save, one for each place, and used by that place's thread; threads that
    copy from there make room too. The writer that leads aborts the unfinished uploads under the run's URL that are
    older than any save. `elsewhere` are good steps of the run in slower tiers, which fill places of a retention here.
    """

    def __init__(self, url: str, *, leads: bool, stripe_count: int = 0, stripe_size_bytes: int = 0) -> None:
        self._url = url
        self._warnings: list[str] = []
        self._pruner, self._pruning = Pruner(), threading.Lock()
        self.elsewhere: Sequence[StepRecord] = ()
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
        storage = open_storage(self._url)
        with self._pruning:
            self.warn(self._pruner.after_save(storage, step, retention, needed=needed, elsewhere=self.elsewhere))

    def has_room(self, num_bytes: int) -> bool:
        """Return whether so many bytes fit, as far as that is known."""
        try:
            free = free_bytes(open_storage(self._url))
        except UserError:
            return True  # the save finds out what is wrong
        return free is None or free >= num_bytes

    def make_room(
        self, retention: Retention, needed: Collection[int] = (), debris_older_than_s: float | None = None
    ) -> None:
        """Delete what is not to be kept although nothing new was saved, but no step that is still `needed`."""
        storage = open_storage(self._url)
        with self._pruning:
            self.warn(
                self._pruner.make_room(storage, retention, needed=needed, elsewhere=self.elsewhere,
                                       debris_older_than_s=debris_older_than_s)
            )  # fmt: skip

    def warn(self, warning: str) -> None:
        """Keep a warning for `take_warning`, "" for none."""
        if warning and warning not in self._warnings:
            self._warnings.append(warning)

    def take_warning(self) -> str:
        """Return what is to be reported and was not yet."""
        found = "; ".join(self._warnings)
        self._warnings.clear()
        return found
