"""Mapped files as native code reads them: what it reports is raised, and single values are copied by it."""

import errno
from typing import Any

import numpy as np
import numpy.typing as npt

from datakit.format.native import store_library
from threefold.mapped import unreadable


def check_read(code: int, what: str) -> None:
    """Raise what a call into native code on this thread returned: MemoryError, or StorageError that names a file.

    A file that was cut short, or whose disk fails, ends nothing but the call.
    """
    if code == -errno.EFAULT:
        raise unreadable(store_library().dk_unread())
    if code == -errno.ENOMEM:
        raise MemoryError(f"no memory for {what}")
    assert code >= 0, f"{what}: native code returned {code}"


def copied(view: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a copy of a contiguous part of a mapped file; StorageError if it cannot be read."""
    copy = np.empty_like(view)
    code = store_library().dk_copy_mapped(view.ctypes.data, view.nbytes, copy.ctypes.data)
    check_read(code, "a copy")
    return copy
