"""Datakit's native library with the types of its functions and structs, which csrc/datakit/datakit.h explains.

Every function runs without the GIL, and keeps no thread between calls. What it reports of mapped files is raised, and
single values of such are copied by it.
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
    # stores
    "dk_scan_shards": (INT64, TEXT, INT64, INT64, INT64, POINTER, POINTER, POINTER, POINTER),
    "dk_find_misfit": (INT64, TEXT, TEXT, POINTER, INT64),
    "dk_copy_mapped": (INT, POINTER, INT64, POINTER),
    "dk_unread": (INT64,),
    "dk_check_documents": (INT, POINTER, POINTER, INT64, POINTER, POINTER, POINTER, POINTER),
    # caches
    "dk_find_blocks": (INT64, TEXT, TEXT, POINTER, INT64, POINTER),
    "dk_write_blocks": (INT64, TEXT, TEXT, TEXT, TEXT, POINTER, POINTER, INT64),
    "dk_evict_blocks": (INT64, TEXT, TEXT, INT64, INT64, INT64, POINTER),
    "dk_lock_bytes": (INT64, INT64, POINTER, INT64),
    "dk_map_blocks": (INT64, TEXT, TEXT, TEXT, POINTER, INT64, POINTER),
    # streams and batches
    "dk_gather": (
        INT, POINTER, INT64, INT64, INT64, POINTER, INT, INT, POINTER, POINTER, POINTER, POINTER, INT,
    ),
    "dk_cut": (INT64, POINTER, POINTER, INT64, INT, INT64, POINTER, POINTER, POINTER, POINTER),
    "dk_ask_ahead": (INT64, POINTER, INT64),
    "dk_read_files": (INT64, POINTER, INT64, INT, POINTER),
    "dk_rotation_counts": (None, INT64, POINTER, INT64, INT64, POINTER),
    "dk_rotation_locate": (INT, INT64, POINTER, INT64, POINTER, INT64, POINTER, POINTER),
    "dk_elements": (None, POINTER, POINTER, POINTER, INT64, POINTER),
    "dk_positions": (None, POINTER, INT64, POINTER, INT64, POINTER),
    # the order of Megatron
    "dk_shuffle": (None, POINTER, POINTER, INT64),
    "dk_token_starts": (INT64, POINTER, INT64, POINTER, INT64, INT64, POINTER),
    "dk_greedy_blend": (INT, POINTER, INT64, INT64, INT64, POINTER, POINTER),
    # packing
    "dk_count_pieces": (INT64, POINTER, INT64, INT64),
    "dk_pack": (INT64, POINTER, INT64, INT64, INT64, INT, POINTER, POINTER, POINTER),
    "dk_gather_packed": (
        INT, POINTER, INT64, INT64, INT64, POINTER, INT, POINTER, POINTER, POINTER, POINTER, INT,
    ),
}  # fmt: skip


def struct(*names: str) -> np.dtype[np.void]:
    """Return a struct of 64-bit integers and addresses, by the names that it has for them in C."""
    return np.dtype([(name, np.int64) for name in names])


STORE = struct("token_starts", "num_shards", "bytes_a_token")
READ = struct("descriptor", "offset", "target", "num_bytes")
EPOCHS = struct("before", "before_bytes", "after", "after_bytes", "size", "block_rows")


@cache
def library() -> ctypes.CDLL:
    """Load the library at first use."""
    return bind(load_library("datakit"), PROTOTYPES)


def check_read(code: int, what: str) -> None:
    """Raise what a call into native code on this thread returned: MemoryError, or StorageError that names a file.

    A file that was cut short, or whose disk fails, ends nothing but the call.
    """
    if code == -errno.EFAULT:
        raise unreadable(library().dk_unread())
    if code == -errno.ENOMEM:
        raise MemoryError(f"no memory for {what}")
    assert code >= 0, f"{what}: native code returned {code}"


def copied(view: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a copy of a contiguous part of a mapped file; StorageError if it cannot be read."""
    copy = np.empty_like(view)
    code = library().dk_copy_mapped(view.ctypes.data, view.nbytes, copy.ctypes.data)
    check_read(code, "a copy")
    return copy


def address_of(array: npt.NDArray[np.generic]) -> int:
    """Return the address of a writable, contiguous array of at least one byte, three times as fast as numpy does."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array.data))
