"""A folder as `transformers` saves it, with the face of a run of one step: `hf:FOLDER`, on any storage.

The folder has no checksums, so its bytes are read unverified. What has its dims in the other order is turned in memory.
"""

import math
from collections.abc import Collection
from functools import cached_property

import numpy as np

from ckptkit.foreign.folder import ForeignFolder
from ckptkit.foreign.folder_source import FolderFiles, FolderSource
from ckptkit.foreign.hf.contents import FILES, Contents, read_contents
from ckptkit.foreign.hf.model_table import Row
from ckptkit.format.root import Root
from ckptkit.io.blocks import Bytes
from ckptkit.model.box import Box
from ckptkit.model.layout import ParallelLayout
from ckptkit.model.placement import Placement
from ckptkit.model.tensor import ITEMSIZE, TensorInfo
from ckptkit.plan.stored import StoredChunks
from ckptkit.runs.run import Run


class HfFolder(ForeignFolder):
    """One model folder, with the methods of a Run that holds one step, 0; nothing is read before the first of them."""

    scheme = "hf:"

    @cached_property
    def contents(self) -> Contents:
        """Return what the folder holds; CheckFailed or UserError if it is not whole or not of a known kind."""
        return read_contents(self.storage)

    def open(self, step: int, exchange: object = None) -> FolderSource:
        """Return a reader, for a `with`; the ranks of an exchange read each for itself."""
        contents, root = self.contents, self.root(step)
        files = FolderFiles(self.storage, {**contents.weights, **contents.files})
        return FolderSource(root, self.url, files, HfParts(contents, root, files))

    def root(self, step: int, exchange: object = None) -> Root:
        """Return the root that a run has whose step this folder is."""
        contents = self.contents
        infos = [_info(row, contents) for row in contents.rows if not row.expert]
        infos += [TensorInfo(FILES + name, "U8", (size,), Placement("first")) for name, size in contents.files.items()]
        tensors = {info.name: info for info in infos}
        return Root(step, self.attempt, ParallelLayout(), contents.num_layers, tensors, (), dict(contents.metadata))

    @property
    def files(self) -> Collection[str]:
        """The files that are read."""
        return {*self.contents.weights, *self.contents.files}


def open_source(url: str) -> Run | HfFolder:
    """Return what an address means: a model folder for `hf:FOLDER`, else a run."""
    return HfFolder(url) if HfFolder.is_meant(url) else Run(url)


def _info(row: Row, contents: Contents) -> TensorInfo:
    name = row.foreign
    if row.placement.tied_to is not None:
        name = next(each.foreign for each in contents.rows if each.name == row.placement.tied_to)
    return TensorInfo(row.name, contents.tensors[name].dtype, row.shape, row.placement)


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
        return StoredChunks.of_boxes(
            [
                *((tensors[row.name], row.box, *self._place(row)) for row in rows),
                *((info, Box.whole(info.shape), number, 0) for info, number in files),
            ]
        )

    def _place(self, row: Row) -> tuple[int, int]:
        if row.is_transposed:
            self._turned.append(row)
            return len(self._files.names) + len(self._turned) - 1, 0
        tensor = self._tensors[row.foreign]
        before = row.first * math.prod(row.shape[1:])
        return self._files.numbers[tensor.file], tensor.offset + before * ITEMSIZE[tensor.dtype]

    def ordered(self, number: int) -> Bytes:
        """Return the bytes of a tensor that the folder holds with its dims in the other order."""
        row = self._turned[number]
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
