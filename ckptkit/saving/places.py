"""Places: checks, before the first save, of where a run is saved and copied to."""

import errno
import os
from collections.abc import Sequence
from dataclasses import replace

from ckptkit.format.address import open_run
from ckptkit.tiers.tier import Tier
from threefold.errors import UserError
from threefold.storage import Storage, is_same_place
from threefold.storage.folders import local_root, make_folders
from threefold.storage.local import local_failures


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
