"""Places: checks, before the first save, of where a run is saved and copied to."""

import errno
import os
from collections.abc import Sequence

from threefold.errors import UserError
from threefold.storage import Storage, is_same_place
from threefold.storage.folders import make_folders
from threefold.storage.local import local_failure


def check_writable(storage: Storage) -> None:
    """Raise StorageError if a run's folder cannot be.

    Told at the start, and not after the steps up to the first save.
    """
    path = storage.local_path("any")
    if path is None:
        return
    try:
        make_folders(path.parent)
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise local_failure(error, "write", path.parent) from error


def check_places(places: Sequence[Storage]) -> None:
    """UserError where two tiers are one place: a file would be copied onto itself, and lost; or where one is fsspec's
    memory, which a writer process fills with what nobody else sees.
    """
    for number, place in enumerate(places):
        if place.url.startswith("memory:"):
            raise UserError(
                f"{place.url} is lost with the process that writes it", hint="/dev/shm/run is memory that stays"
            )
        if any(is_same_place(place, other) for other in places[:number]):
            raise UserError(f"{place.url} is named twice as a tier", hint="name each tier once, the fastest first")
