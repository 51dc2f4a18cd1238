"""ChunkTable: many chunks as numpy columns, so that planning makes no Python object per chunk.

Boxes are left-padded to one number of dims (offset 0, shape 1), which changes no row-major position.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ckptkit.chunk import Box, Piece
from ckptkit.tensor import ITEMSIZE, TensorInfo
from threefold.errors import UserError

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ChunkTable:
    """Columns of N chunks over T tensors with at most D dims.

    names[T], dtypes[T], ndims[T]; tensor[N] indexes them; offset[N, D] and shape[N, D] are boxes; start[N] and stop[N]
    are ranges of row-major positions in the boxes.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    ndims: tuple[int, ...]
    tensor: Ints
    offset: Ints
    shape: Ints
    start: Ints
    stop: Ints

    def __len__(self) -> int:
        return len(self.tensor)

    @classmethod
    def of(cls, chunks: Sequence[tuple[TensorInfo, Box, int, int]]) -> "ChunkTable":
        """The table of (tensor, box, start, stop); rows keep their order."""
        infos = {info.name: info for info, *_ in chunks}
        index = {name: i for i, name in enumerate(infos)}
        num_dims = max((len(info.shape) for info in infos.values()), default=0)
        offset = np.zeros((len(chunks), num_dims), np.int64)
        shape = np.ones((len(chunks), num_dims), np.int64)
        for row, (info, box, _, _) in enumerate(chunks):
            if info.shape:
                offset[row, -len(info.shape) :] = box.offset
                shape[row, -len(info.shape) :] = box.shape
        return cls(
            tuple(infos),
            tuple(info.dtype for info in infos.values()),
            tuple(len(info.shape) for info in infos.values()),
            np.array([index[info.name] for info, *_ in chunks], np.int64),
            offset,
            shape,
            np.array([start for _, _, start, _ in chunks], np.int64),
            np.array([stop for *_, stop in chunks], np.int64),
        )

    @classmethod
    def of_pieces(cls, pieces: Iterable[Piece], tensors: Iterable[TensorInfo]) -> "ChunkTable":
        """The table of pieces in their order; refuses, in one report, pieces that do not fit the tensor table."""
        infos = {info.name: info for info in tensors}
        chunks, faults = [], []
        for piece in pieces:
            info = infos.get(piece.name)
            fault = _misfit(piece, info)
            if fault or info is None:
                faults.append(f"{piece.name}: {fault}")
            else:
                chunks.append((info, piece.box, piece.start, piece.stop))
        if faults:
            raise UserError("pieces do not fit the checkpoint's tensor table:\n  " + "\n  ".join(faults))
        return cls.of(chunks)

    @cached_property
    def itemsize(self) -> Ints:
        """Bytes an element of each chunk."""
        return np.array([ITEMSIZE[dtype] for dtype in self.dtypes], np.int64)[self.tensor]

    @cached_property
    def size_bytes(self) -> Ints:
        """Bytes of each chunk."""
        return (self.stop - self.start) * self.itemsize

    def take(self, rows: npt.NDArray[np.integer] | slice) -> "ChunkTable":
        """Some rows, in the given order, over the same tensors."""
        return ChunkTable(
            self.names, self.dtypes, self.ndims,
            self.tensor[rows], self.offset[rows], self.shape[rows], self.start[rows], self.stop[rows],
        )  # fmt: skip

    def box(self, row: int) -> Box:
        """The box of one chunk, without the padding dims."""
        skip = self.offset.shape[1] - self.ndims[self.tensor[row]]
        return Box(tuple(self.offset[row, skip:].tolist()), tuple(self.shape[row, skip:].tolist()))

    def with_tensors(self, infos: Sequence[TensorInfo]) -> "ChunkTable":
        """The same chunks numbered by a common tensor table, of which every name here must be a part."""
        index = {info.name: i for i, info in enumerate(infos)}
        numbers = np.array([index[name] for name in self.names], np.int64)
        return ChunkTable(
            tuple(index), tuple(info.dtype for info in infos), tuple(len(info.shape) for info in infos),
            numbers[self.tensor], self.offset, self.shape, self.start, self.stop,
        )  # fmt: skip

    @staticmethod
    def concatenate(tables: Sequence["ChunkTable"]) -> "ChunkTable":
        """All rows of tables over the same tensors, in order."""
        assert tables, "at least one table"
        first, num_dims = tables[0], max(table.offset.shape[1] for table in tables)
        assert all(table.names == first.names for table in tables), "tables over the same tensors"
        return ChunkTable(
            first.names, first.dtypes, first.ndims,
            np.concatenate([table.tensor for table in tables]),
            np.concatenate([_left_padded(table.offset, num_dims, 0) for table in tables]),
            np.concatenate([_left_padded(table.shape, num_dims, 1) for table in tables]),
            np.concatenate([table.start for table in tables]),
            np.concatenate([table.stop for table in tables]),
        )  # fmt: skip


def _left_padded(columns: Ints, num_dims: int, value: int) -> Ints:
    missing = num_dims - columns.shape[1]
    return np.pad(columns, ((0, 0), (missing, 0)), constant_values=value) if missing else columns


def _misfit(piece: Piece, info: TensorInfo | None) -> str | None:
    if info is None:
        return "not in the table"
    box = piece.box
    if len(box.offset) != len(info.shape) or len(box.shape) != len(info.shape):
        return f"box {box.offset}+{box.shape} has other dims than shape {list(info.shape)}"
    if any(a < 0 or n < 0 or a + n > size for a, n, size in zip(box.offset, box.shape, info.shape, strict=True)):
        return f"box {box.offset}+{box.shape} leaves shape {list(info.shape)}"
    if not 0 <= piece.start <= piece.stop <= box.numel:
        return f"range [{piece.start}, {piece.stop}) leaves its box of {box.numel} elements"
    return None
