"""HfParts: where a model folder has the tensors of a run. What has its dims in the other order is turned in memory."""

import math
from functools import cached_property

import numpy as np

from ckptkit.foreign.folder_source import FolderFiles
from ckptkit.foreign.hf.contents import FILES, Contents
from ckptkit.foreign.hf.model_table import Row
from ckptkit.format.root import Root
from ckptkit.io.blocks import Bytes
from ckptkit.model.box import Box
from ckptkit.model.tensor import ITEMSIZE
from ckptkit.plan.stored import StoredChunks


class HfParts:
    """The tensors of a model folder, as FolderParts.

    Memory beside what is read into: the largest turned tensor twice, and that of GPT-2's fused q, k and v once more.
    """

    def __init__(self, contents: Contents, root: Root, files: FolderFiles) -> None:
        self._contents, self._root, self._files = contents, root, files
        self._tensors = contents.tensors
        self._turned: list[Row] = []  # the tensors of the parts behind the files
        self._kept: dict[str, Bytes] = {}  # what was read or turned last

    @cached_property
    def stored(self) -> StoredChunks:
        """All tensors: the part and the place of each."""
        tensors = self._root.tensors
        rows = [row for row in self._contents.rows if row.placement.tied_to is None]
        files = [(tensors[FILES + name], self._files.numbers[name]) for name in self._contents.files]
        return StoredChunks.of_boxes([
            *((tensors[row.name], row.box, *self._place(row)) for row in rows),
            *((info, Box.whole(info.shape), number, 0) for info, number in files),
        ])  # fmt: skip

    def _place(self, row: Row) -> tuple[int, int]:
        if row.is_transposed:
            self._turned.append(row)
            return len(self._files.names) + len(self._turned) - 1, 0
        tensor = self._tensors[row.foreign]
        before = row.first * math.prod(row.shape[1:])
        return self._files.numbers[tensor.file], tensor.offset + before * ITEMSIZE[tensor.dtype]

    def ordered(self, number: int) -> Bytes:
        """Return the bytes of a turned tensor."""
        return self._turn(self._turned[number])

    def _turn(self, row: Row) -> Bytes:
        """Return the bytes of a tensor that the folder holds with its dims in the other order."""
        name, tensor = row.name, self._tensors[row.foreign]
        if name not in self._kept:
            if row.foreign not in self._kept:
                self._kept = {row.foreign: np.empty(tensor.size_bytes, np.uint8)}
                place = (tensor.offset, tensor.size_bytes, self._kept[row.foreign].ctypes.data)
                self._files.read(tensor.file, [place])
            whole = self._kept[row.foreign].view(f"u{ITEMSIZE[tensor.dtype]}").reshape(tensor.shape)
            part = whole[:, row.first : row.first + row.shape[0]]
            self._kept[name] = np.ascontiguousarray(part.T).reshape(-1).view(np.uint8)
        return self._kept[name]
