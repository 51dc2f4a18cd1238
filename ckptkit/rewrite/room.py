"""Room: whether a local disk can hold what is to be written, looked up before anything is."""

import os
from shlex import quote

from threefold.errors import StorageError
from threefold.storage import Storage
from threefold.storage.folders import local_root
from threefold.storage.local import local_failures


def refuse_full(storage: Storage, num_bytes: int) -> None:
    """Raise StorageError if a local folder's disk has less room than so many bytes; other storages are not asked."""
    root = local_root(storage)
    if root is None:
        return
    place = next(each for each in (root, *root.parents) if each.exists())
    with local_failures("look up", place):
        status = os.statvfs(place)
    free = status.f_bavail * status.f_frsize
    if free < num_bytes:
        raise StorageError(
            f"{storage.url} needs {num_bytes:,} bytes, its disk has {free:,} left",
            hint=f"free some space or choose another place; df -h {quote(str(place))}",
        )
