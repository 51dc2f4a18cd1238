"""CheckpointerOptions: how a run saves; checks, before the first save, of where it is saved and copied to."""

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from ckptkit.format.address import open_run
from ckptkit.io.striping import check_striping
from ckptkit.runs.retention import Retention
from ckptkit.tiers.tier import Node, Tier
from threefold.errors import UserError
from threefold.storage import Storage, is_same_place
from threefold.storage.folders import local_root, make_folders
from threefold.storage.local import local_failures

WhenBusy = Literal["wait", "skip", "abort"]


@dataclass(frozen=True, slots=True)
class CheckpointerOptions:
    """How to save.

    deadline_s bounds the wait for the other ranks' files; a writer that is not done after timeout_s is killed; what
    fails for a cause that may pass is tried again for retry_s; after max_failed_saves failures in a row `save` raises;
    after each commit, once the new step was read back, steps that `retention` does not keep are deleted. `code` is the
    version of the code that saves, for the root; left empty it is the commit of the git tree that the program was
    started in, if any.

    The arena has room for the rank's whole state, or, with window_bytes > 0, for so much of it: then a save takes as
    long as the storage. when_busy says what a save does that meets one before it still running: "wait" for it, "skip"
    (the new save is not made) or "abort" (the older is not).

    `tiers` are the slower places that steps are copied to in the background, each at its own interval: the first step
    that is saved once a multiple of `every` is reached, though that one was skipped, or its save failed; `node` says
    which of the run's writers save to this URL, where it is not one place for all nodes. Where the program `lfs` is
    there, files on Lustre get stripe_count stripes of stripe_size_bytes each (0: by their size and the number of ranks;
    -1 stripes: one on every target).
    """

    deadline_s: float = 600.0
    timeout_s: float = 3600.0
    retry_s: float = 60.0
    max_failed_saves: int = 3
    retention: Retention = field(default_factory=Retention)
    code: str = ""
    num_threads: int = 2
    window_bytes: int = 0
    when_busy: WhenBusy = "wait"
    tiers: tuple[Tier, ...] = ()
    node: Node | None = None
    stripe_count: int = 0
    stripe_size_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("deadline_s", "timeout_s", "retry_s"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not value >= 0:
                raise UserError(f"{name} {value!r} is not a number of seconds from 0")
        for name, least in (("max_failed_saves", 1), ("num_threads", 1), ("window_bytes", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise UserError(f"{name} {value!r} is not a whole number from {least}")
        if self.when_busy not in get_args(WhenBusy):
            raise UserError(f"when_busy {self.when_busy!r} is none of {', '.join(get_args(WhenBusy))}")
        if not isinstance(self.tiers, tuple) or not all(isinstance(tier, Tier) for tier in self.tiers):
            raise UserError(f"tiers {self.tiers!r} is not a tuple of Tier", hint='(Tier("s3://bucket/run", every=10),)')
        if not isinstance(self.retention, Retention):
            raise UserError(f"retention {self.retention!r} is not a Retention", hint="Retention(keep_last=3)")
        check_striping(self.stripe_count, self.stripe_size_bytes)


def check_writable(storage: Storage) -> None:
    """Raise StorageError if a run's folder cannot be: at the start, and not after the steps up to the first save."""
    folder = local_root(storage)
    if folder is None:
        return
    with local_failures("write", folder):
        make_folders(folder)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def open_tiers(first: Storage, tiers: Sequence[Tier]) -> list[Tier]:
    """Return the slower tiers with the addresses of their storages, which are opened once, before the first save.

    So a broken URL is an error at the start, and no save pays for a client's import. Raise UserError if two places are
    one, where a file would be copied onto itself and lost, or one is fsspec's memory, which is the writer process's.
    """
    places = [first, *(open_run(tier.url) for tier in tiers)]
    for number, place in enumerate(places):
        if place.url.startswith("memory:"):
            raise UserError(
                f"{place.url} is lost with the process that writes it", hint="/dev/shm/run is memory that stays"
            )
        if any(is_same_place(place, other) for other in places[:number]):
            raise UserError(f"{place.url} is named twice as a tier", hint="name each tier once, the fastest first")
    return [replace(tier, url=place.address) for tier, place in zip(tiers, places[1:], strict=True)]
