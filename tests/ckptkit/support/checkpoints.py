"""Writes small checkpoints to any storage in the plainest way, so that readers are tested without the Checkpointer."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ckptkit.format.keys import ROOT_KEY, part_keys, step_folder
from ckptkit.format.part_index import PartIndex
from ckptkit.format.root import Part, Root
from ckptkit.io.blocks import checksums, xxh3_64
from ckptkit.model.layout import ParallelLayout
from ckptkit.model.tensor import Box, Piece, TensorInfo
from ckptkit.plan.save_plan import plan_save
from ckptkit.plan.stored import Bounds, PartJoin, StoredChunks
from tests.ckptkit.support.model_tables import rank_chunks
from threefold.storage import Storage


def cut(array: np.ndarray, box: Box, start: int, stop: int) -> np.ndarray:
    """The elements [start, stop) of a box of an array."""
    window = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
    return np.ascontiguousarray(array[window]).reshape(-1)[start:stop]


def stored_chunks(
    indexes: Sequence[PartIndex], tensors: Sequence[TensorInfo], bounds: Bounds | None = None
) -> StoredChunks:
    """The chunks of all parts, or those only that may meet the bounds."""
    join = PartJoin(tensors, bounds)
    return join.joined([join.of(number, index, f"part {number}") for number, index in enumerate(indexes)])


def write_checkpoint(
    storage: Storage,
    step: int,
    layout: ParallelLayout,
    num_layers: int,
    tensors: list[TensorInfo],
    arrays: Mapping[str, np.ndarray],
    *,
    max_chunks: int = 200_000,
    metadata: Mapping[str, Any] | None = None,
) -> Root:
    """What the ranks of `layout` would save, committed."""
    parts, folder, attempt = [], step_folder(step), "a1"
    for rank in range(layout.world_size):
        chunks = rank_chunks(tensors, num_layers, layout, layout.coords(rank))
        pieces = [Piece(info.name, box, a, b, cut(arrays[info.name], box, a, b)) for info, box, a, b in chunks]
        plan = plan_save(pieces, tensors, max_chunks=max_chunks)
        for n, (file, rows) in enumerate(zip(plan.files, plan.rows, strict=True)):
            data = file.header + b"".join(pieces[row].data.tobytes() for row in rows)
            index = file.index(checksums(data)).to_bytes()
            keys = part_keys(attempt, rank, n)
            storage.write(f"{folder}/{keys[0]}", data)
            storage.write(f"{folder}/{keys[1]}", index)
            parts.append(Part(keys[0], len(data), keys[1], len(index), xxh3_64(index)))
    root = Root(
        step, attempt, layout, num_layers, {t.name: t for t in tensors}, tuple(parts), metadata or {"tokens": 5}
    )
    storage.write(f"{folder}/{ROOT_KEY}", root.to_bytes(), if_absent=True)
    return root
