"""Trees: what a PyTorch program kept beside its tensors, as the ranks that saved it wrote it down; no torch."""

import json

import numpy as np

from ckptkit.format.state_tree import STATE_NAME, Tree
from ckptkit.loading.chunk_source import ChunkSource
from ckptkit.loading.restore import restore_from
from ckptkit.model.box import Box, Piece
from threefold.errors import CheckFailed


def read_trees(source: ChunkSource) -> dict[int, Tree]:
    """Return the trees that each rank wrote, by rank; CheckFailed if one is not JSON."""
    tensors = source.root.tensors
    numbers = sorted(int(name.removeprefix(STATE_NAME)) for name in tensors if is_tree(name))
    memory = {number: np.empty(tensors[f"{STATE_NAME}{number}"].shape, np.uint8) for number in numbers}
    restore_from(source, [
        Piece.whole(f"{STATE_NAME}{number}", Box((0,), (len(data),)), data) for number, data in memory.items()
    ])  # fmt: skip
    try:
        return {number: dict(json.loads(data.tobytes())) for number, data in memory.items()}
    except (TypeError, ValueError) as error:
        raise CheckFailed(f"{source.url} holds a tree of values that is not JSON: {error}") from None


def is_tree(name: str) -> bool:
    """Return whether a tensor of this name holds the trees of a rank."""
    return name.startswith(STATE_NAME) and name.removeprefix(STATE_NAME).isdecimal()
