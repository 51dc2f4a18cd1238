"""Room: what a disk can hold still, looked up before anything is written, and whether a failure was for want of it."""

import os
from pathlib import Path
from shlex import quote

from threefold.errors import StorageError
from threefold.storage import Storage
from threefold.storage.folders import local_root
from threefold.storage.local import NO_ROOM, local_failures


def free_bytes(storage: Storage) -> int | None:
    """Return how many bytes the disk of a local folder can still take; None of other storages, which are not asked."""
    if (place := _place(storage)) is None:
        return None
    with local_failures("look up", place):
        status = os.statvfs(place)
    return status.f_bavail * status.f_frsize


def refuse_full(storage: Storage, num_bytes: int) -> None:
    """Raise StorageError if a local folder's disk has less room than so many bytes; other storages are not asked."""
    free = free_bytes(storage)
    if free is not None and free < num_bytes:
        raise StorageError(
            f"{storage.url} needs {num_bytes:,} bytes, its disk has {free:,} left",
            hint=f"free some space or choose another place; df -h {quote(str(_place(storage)))}",
        )


def is_out_of_room(error: BaseException | None) -> bool:
    """Return whether a failure, or what it was raised from, is that a disk or a quota is full."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            return True
        error = error.__cause__
    return False


def _place(storage: Storage) -> Path | None:
    """Return the nearest folder that is there, of a local storage."""
    root = local_root(storage)
    return None if root is None else next(each for each in (root, *root.parents) if each.exists())
