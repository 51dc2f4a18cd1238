"""Stores' part of datakit's native library, with the types of its functions; csrc/datakit/datakit.h explains them.

What it reports of mapped files is raised, and single values of such are copied by it.
"""

import ctypes
import errno
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from threefold.mapped import unreadable
from threefold.native import INT, INT64, POINTER, TEXT, Prototypes, bind, load_library

PROTOTYPES: Prototypes = {
    "dk_scan_shards": (INT64, TEXT, INT64, INT64, INT64, POINTER, POINTER, POINTER, POINTER),
    "dk_find_misfit": (INT64, TEXT, TEXT, POINTER, INT64),
    "dk_copy_mapped": (INT, POINTER, INT64, POINTER),
    "dk_unread": (INT64,),
    "dk_check_documents": (INT, POINTER, POINTER, INT64, POINTER, POINTER, POINTER, POINTER),
}


@cache
def store_library() -> ctypes.CDLL:
    """Load the library at first use."""
    return bind(load_library("datakit"), PROTOTYPES)


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
