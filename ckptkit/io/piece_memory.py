"""Whether the memory of a piece is its elements, one after the other."""

import contextlib
from collections.abc import Sequence
from typing import Any

from ckptkit.io.torch_tensors import are_contiguous, are_in_memory, held_by, no_memory, num_bytes
from ckptkit.model.box import Piece
from ckptkit.model.tensor import ITEMSIZE
from threefold.errors import UserError


def check_memory(pieces: Sequence[Piece], sizes: Sequence[int], dtypes: Sequence[str]) -> None:
    """Raise UserError if a piece's memory is not its elements, of so many bytes and a dtype, one after the other."""
    if are_plain([piece.data for piece in pieces], sizes, dtypes):
        return
    for piece, dtype in zip(pieces, dtypes, strict=True):
        if fault := memory_misfit(piece, dtype):
            raise UserError(f"{piece.name}: {fault}", hint=way_out(piece))


def are_plain(data: Sequence[Any], sizes: Sequence[int], dtypes: Sequence[str]) -> bool:
    """Return whether arrays and tensors are all in memory, of so many bytes and these dtypes, and contiguous."""
    with contextlib.suppress(AttributeError, RuntimeError):  # of what is not an array, or has no memory
        pairs = {(each.dtype, dtype) for each, dtype in zip(data, dtypes, strict=True)}
        is_held = all(dtype in held_by(memory) for memory, dtype in pairs)
        return (
            is_held and are_in_memory(data) and [each.nbytes for each in data] == list(sizes) and are_contiguous(data)
        )
    return False


def memory_misfit(piece: Piece, dtype: str) -> str | None:
    """Return what is wrong with a piece whose memory is not its elements one after the other, None for a sound one."""
    if not hasattr(piece.data, "dtype"):
        return f"{dtype}, and a piece's memory is a {type(piece.data).__name__}, not an array or a tensor"
    if absent := no_memory(piece.data):
        return f"{dtype}, and a piece is {absent[0]}"
    if dtype not in held_by(piece.data.dtype):
        return f"{dtype}, and a piece's memory is {piece.data.dtype}"
    wanted, found = (piece.stop - piece.start) * ITEMSIZE[dtype], num_bytes(piece.data)
    if found != wanted:
        return f"a piece of {wanted} bytes has memory of {found} bytes"
    return None if are_contiguous([piece.data]) else "a piece's memory is not contiguous"


def way_out(piece: Piece) -> str | None:
    """Return what to pass in place of a piece's data that has no memory of its own."""
    absent = no_memory(piece.data)
    return absent and absent[1]
