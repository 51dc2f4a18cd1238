"""Whole tensors out of the pieces of all ranks, and back: what a checkpoint does, in memory."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ckptkit import Piece, TensorInfo
from trainer.verify.difference import require_equal

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16}


def copied(pieces: Iterable[Piece]) -> list[Piece]:
    """Return the pieces with numpy copies of their data, which can go to another process."""
    return [replace(piece, data=_copied(piece.data.cpu())) for piece in pieces]


def _copied(data: Tensor) -> Any:
    return data.clone() if data.dtype == torch.bfloat16 else data.numpy().copy()  # numpy has no bf16


def assembled(tensors: Sequence[TensorInfo], pieces: Iterable[Piece]) -> dict[str, Tensor]:
    """Return the whole tensors; Different if the pieces do not hold each element of each tensor once."""
    infos = {info.name: info for info in tensors if info.placement.tied_to is None}
    state = {name: torch.zeros(info.shape, dtype=DTYPES[info.dtype]) for name, info in infos.items()}
    times = {name: torch.zeros(info.shape, dtype=torch.int64) for name, info in infos.items()}
    for piece in pieces:
        positions = _positions(piece, infos[piece.name].shape)
        state[piece.name].view(-1)[positions] = torch.as_tensor(piece.data)
        times[piece.name].view(-1)[positions] += 1
    require_equal(all(bool((count == 1).all()) for count in times.values()), "an element is held never or twice")
    return state


def fill(pieces: Iterable[Piece], state: dict[str, Tensor]) -> None:
    """Write the pieces' part of the whole tensors into them."""
    for piece in pieces:
        whole = state[piece.name]
        piece.data.copy_(whole.reshape(-1)[_positions(piece, whole.shape)])


def _positions(piece: Piece, shape: Sequence[int]) -> Tensor:
    """Return the flat positions of a piece's elements in the whole tensor."""
    ends = (slice(start, start + size) for start, size in zip(piece.box.offset, piece.box.shape, strict=True))
    positions = torch.arange(torch.Size(shape).numel()).view(tuple(shape))
    return positions[tuple(ends)].flatten()[piece.start : piece.stop]
