"""What the cache calls of datakit's native library, with the types; csrc/datakit/datakit.h explains the functions."""

import ctypes
from functools import cache

from threefold.native import INT64, POINTER, TEXT, Prototypes, bind, load_library

PROTOTYPES: Prototypes = {
    "dk_find_blocks": (INT64, TEXT, TEXT, POINTER, INT64, POINTER),
    "dk_write_blocks": (INT64, TEXT, TEXT, TEXT, TEXT, POINTER, POINTER, INT64),
    "dk_evict_blocks": (INT64, TEXT, TEXT, INT64, INT64, INT64, POINTER),
    "dk_lock_bytes": (INT64, INT64, POINTER, INT64),
    "dk_map_blocks": (INT64, TEXT, TEXT, TEXT, POINTER, INT64, POINTER),
}


@cache
def cache_library() -> ctypes.CDLL:
    """Load the library at first use."""
    return bind(load_library("datakit"), PROTOTYPES)
