"""A lock on the folder of an attempt: one process at a time writes it, or several that share its files.

The name of an attempt follows from what it is made of, so two equal calls at once have the same keys. On a local disk
the second is refused; the lock ends with the process. On an object store both write the same bytes under the same
keys, each object at once, and neither removes what the other may name.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator

from threefold.errors import UserError
from threefold.storage import Storage
from threefold.storage.folders import Folder, local_root
from threefold.storage.local import local_failures


@contextlib.contextmanager
def claimed(storage: Storage, inner: str, *, is_shared: bool) -> Iterator[None]:
    """Hold a folder of a local disk; UserError if another process does. Where there are no locks, nothing is held.

    Several processes may hold it if all of them share it. Of the folders that this makes those stay that hold something
    at the end.
    """
    root = local_root(storage)
    if root is None:
        yield
        return
    made = [each for each in (root / inner, root / os.path.dirname(inner), root) if not each.exists()]
    with local_failures("lock", root / inner), Folder(root, inner, make=True) as folder:
        held = folder.open(".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(held, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except BlockingIOError:
                text = f"another process writes the same into {storage.url}/{inner}"
                raise UserError(text, hint="wait until it ends, then run this again") from None
        yield
    finally:
        os.close(held)
        for each in made:
            with contextlib.suppress(OSError):
                each.rmdir()
