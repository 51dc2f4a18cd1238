"""The stream's part of datakit's native library, with the types of its functions; csrc/datakit/datakit.h explains them.

Every function runs without the GIL, and keeps no thread between calls.
"""

import ctypes
from functools import cache

import numpy as np
import numpy.typing as npt

from threefold.native import INT, INT64, POINTER, Prototypes, bind, load_library

PROTOTYPES: Prototypes = {
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
}  # fmt: skip
MEGATRON_PROTOTYPES: Prototypes = {
    "dk_shuffle": (None, POINTER, POINTER, INT64),
    "dk_token_starts": (INT64, POINTER, INT64, POINTER, INT64, INT64, POINTER),
    "dk_greedy_blend": (INT, POINTER, INT64, INT64, INT64, POINTER, POINTER),
}


@cache
def stream_library() -> ctypes.CDLL:
    """Load the library at first use."""
    return bind(load_library("datakit"), PROTOTYPES)


@cache
def megatron_library() -> ctypes.CDLL:
    """Load the library at first use, with what the order of Megatron needs of it."""
    return bind(load_library("datakit"), MEGATRON_PROTOTYPES)


def address_of(array: npt.NDArray[np.generic]) -> int:
    """Return the address of a writable, contiguous array of at least one byte, three times as fast as numpy does."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array.data))
