"""Stores' part of datakit's native library, with the types of its functions; csrc/datakit/datakit.h explains them."""

import ctypes
from functools import cache

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
