"""Upkeep: what a writer does for the place it saves to besides saving: stripes, and uploads left by killed writers."""

from ckptkit.io.striping import Striper
from threefold.errors import UserError
from threefold.storage import open_storage
from threefold.storage.stale_uploads import abort_stale_uploads


class Upkeep:
    """Made once, before a writer's first save; nothing here fails a save, but what went wrong is a warning, told once.

    Writer 0 aborts the unfinished uploads under the run's URL that are older than any save.
    """

    def __init__(self, url: str, writer: int, stripe_count: int, stripe_size_bytes: int) -> None:
        self._warnings: list[str] = []
        self.striper = Striper(stripe_count, stripe_size_bytes, self._warnings.append)
        if writer == 0:
            try:
                abort_stale_uploads(open_storage(url))
            except UserError as error:
                self._warnings.append(str(error))

    def take_warning(self) -> str:
        """What is to be told and was not yet."""
        told = "; ".join(self._warnings)
        self._warnings.clear()
        return told
