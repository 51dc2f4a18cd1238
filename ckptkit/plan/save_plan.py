"""Plan a save: lay the pieces of one writer out in data files. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ckptkit.format.data_file import MAX_CHUNKS, DataFile
from ckptkit.model.chunk_table import ChunkTable, Ints
from ckptkit.model.tensor import Piece, TensorInfo, storage_order


@dataclass(frozen=True, eq=False)
class SavePlan:
    """One writer's data files; rows[f] are the numbers of the pieces in file f, in file order."""

    files: tuple[DataFile, ...]
    rows: tuple[Ints, ...]


def plan_save(pieces: Sequence[Piece], tensors: Sequence[TensorInfo], *, max_chunks: int = MAX_CHUNKS) -> SavePlan:
    """Return the files in which one writer stores its pieces.

    Always at least one. UserError where pieces do not fit.
    """
    chunks = ChunkTable.of_pieces(pieces, tensors)
    return plan_files(chunks, storage_rows(chunks, tensors), max_chunks=max_chunks)


def plan_files(chunks: ChunkTable, order: Ints, *, max_chunks: int = MAX_CHUNKS) -> SavePlan:
    """Return the files in which one writer stores its chunks, given their numbers in storage order."""
    rows = tuple(order[i : i + max_chunks] for i in range(0, max(len(order), 1), max_chunks))
    return SavePlan(tuple(DataFile.of(chunks.take(part)) for part in rows), rows)


def storage_rows(chunks: ChunkTable, tensors: Sequence[TensorInfo]) -> Ints:
    """Return the rows of chunks that hold elements, in the order in which every writer stores them."""
    rank = {info.name: i for i, info in enumerate(sorted(tensors, key=storage_order))}
    ranks = np.array([rank[name] for name in chunks.names], np.int64)[chunks.tensor]
    columns = [chunks.offset[:, dim] for dim in range(chunks.offset.shape[1])]
    order = np.lexsort([chunks.start, *reversed(columns), ranks])
    return order[chunks.stop[order] > chunks.start[order]]
