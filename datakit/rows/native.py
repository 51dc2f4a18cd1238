"""Datakit's native library for rows and batches, with the types of its functions; csrc/datakit/datakit.h explains them.

Every function runs without the GIL, and keeps no thread between calls.
"""

import ctypes
from functools import cache

import numpy as np
import numpy.typing as npt

from datakit.format.shard import Int64s
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

MAX_SEQ_LENGTH = 1 << 24
PACKING_PROTOTYPES: Prototypes = {
    "dk_count_pieces": (INT64, POINTER, INT64, INT64),
    "dk_pack": (INT64, POINTER, INT64, INT64, INT64, INT, POINTER, POINTER, POINTER),
    "dk_gather_packed": (
        INT, POINTER, INT64, INT64, INT64, POINTER, INT, POINTER, POINTER, POINTER, POINTER, INT,
    ),
}  # fmt: skip
Int32s = npt.NDArray[np.int32]


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


@cache
def packing_library() -> ctypes.CDLL:
    """Load the library at first use, with what packing needs of it."""
    return bind(load_library("datakit"), PACKING_PROTOTYPES)


def pack_documents(
    lengths: Int32s, first_token: int, seq_length: int, *, best_fit: bool
) -> tuple[Int64s, Int64s, Int32s]:
    """Return the rows of documents of these lengths that follow each other from a token on: ends, starts and sizes.

    The pieces of row r are ends[r - 1] up to ends[r] of the other two, which docs/formats/packing-index.md explains.
    MemoryError if the pieces do not fit into memory.
    """
    library = packing_library()
    num_pieces = library.dk_count_pieces(lengths.ctypes.data, len(lengths), seq_length)
    assert num_pieces >= 0, "lengths are from 0 on, and rows from 1 to MAX_SEQ_LENGTH tokens"
    ends, starts, sizes = (np.empty(num_pieces, dtype) for dtype in (np.int64, np.int64, np.int32))
    num_rows = library.dk_pack(
        lengths.ctypes.data, len(lengths), first_token, seq_length, best_fit, ends.ctypes.data, starts.ctypes.data,
        sizes.ctypes.data,
    )  # fmt: skip
    if num_rows < 0:
        raise MemoryError(f"no memory for rows of {num_pieces} pieces")
    return ends[:num_rows], starts, sizes
