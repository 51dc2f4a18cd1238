"""HfReader: a model folder open for planned reads. What it holds with its dims in the other order is turned."""

from functools import cached_property

import numpy as np

from ckptkit.foreign.folder_reader import FolderReader
from ckptkit.foreign.hf_contents import FILES, Contents
from ckptkit.format.root import Root
from ckptkit.io.blocks import Bytes
from ckptkit.model.box import Box
from ckptkit.model.chunk_table import ChunkTable
from ckptkit.model.tensor import ITEMSIZE
from ckptkit.plan.stored import StoredChunks
from threefold.storage import Storage


class HfReader(FolderReader):
    """The tensors of a folder under the names of a run; use it in a `with`.

    Memory beside what is read into: the largest turned tensor twice, and that of GPT-2's fused q, k and v once more.
    """

    def __init__(self, storage: Storage, contents: Contents, root: Root, url: str) -> None:
        super().__init__(storage, root, url, {**contents.weights, **contents.files})
        self._rows = {row.name: row for row in contents.rows}
        self._tensors = contents.tensors
        self._turned: list[str] = []  # the tensors of the parts behind the files
        self._kept: dict[str, Bytes] = {}  # what was read or turned last

    @cached_property
    def stored(self) -> StoredChunks:
        """All tensors: the part and the place of each."""
        chunks, parts, offsets = [], [], []
        for info in self.root.tensors.values():
            if info.placement.tied_to is not None:
                continue
            chunks.append((info, Box((0,) * len(info.shape), info.shape), 0, info.numel))
            part, offset = self._place(info.name)
            parts.append(part)
            offsets.append(offset)
        return StoredChunks(ChunkTable.of(chunks), np.array(parts, np.int64), np.array(offsets, np.int64))

    def _place(self, name: str) -> tuple[int, int]:
        if name.startswith(FILES):
            return self._names.index(name.removeprefix(FILES)), 0
        row = self._rows[name]
        if row.is_transposed:
            self._turned.append(name)
            return len(self._names) + len(self._turned) - 1, 0
        tensor = self._tensors[row.foreign]
        return self._names.index(tensor.file), tensor.offset + row.first * ITEMSIZE[tensor.dtype]

    def ordered(self, number: int) -> Bytes:
        """Return the bytes of a turned tensor."""
        return self._turn(self._turned[number])

    def _turn(self, name: str) -> Bytes:
        """Return the bytes of a tensor that the folder holds with its dims in the other order."""
        row = self._rows[name]
        tensor = self._tensors[row.foreign]
        if name not in self._kept:
            if row.foreign not in self._kept:
                self._kept = {row.foreign: np.empty(tensor.size_bytes, np.uint8)}
                place = (tensor.offset, tensor.size_bytes, self._kept[row.foreign].ctypes.data)
                self._reader(tensor.file).read([place], num_threads=self.num_threads)
            whole = self._kept[row.foreign].view(f"u{ITEMSIZE[tensor.dtype]}").reshape(tensor.shape)
            part = whole[:, row.first : row.first + row.shape[0]]
            self._kept[name] = np.ascontiguousarray(part.T).reshape(-1).view(np.uint8)
        return self._kept[name]
