"""The stream's part of datakit's native library, with the types of its functions; csrc/datakit/datakit.h explains them.

Every function runs without the GIL, and keeps no thread or state between calls.
"""

import ctypes
from functools import cache

import numpy as np
import numpy.typing as npt

from threefold.native import load_library


@cache
def stream_library() -> ctypes.CDLL:
    """Load the library at first use."""
    library = load_library("datakit")
    pointer, number, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.dk_gather.restype = ctypes.c_int
    library.dk_gather.argtypes = [
        pointer, number, number, number, pointer, flag, flag, pointer, pointer, pointer, pointer, flag,
    ]  # fmt: skip
    library.dk_rotation_counts.restype = library.dk_rotation_locate.restype = library.dk_permute.restype = None
    library.dk_rotation_counts.argtypes = [number, pointer, number, number, pointer]
    library.dk_rotation_locate.argtypes = [number, pointer, number, pointer, number, pointer, pointer]
    library.dk_permute.argtypes = [pointer, number, number, pointer]
    return library


def address_of(array: npt.NDArray[np.generic]) -> int:
    """Where a writable, contiguous array of at least one byte lies; `array.ctypes.data` at a third of the time."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array.data))
