"""HfReader: a model folder open for planned reads, as CheckpointReader opens a step of a run.

A plan's parts are the folder's files, and behind these one for each tensor that the folder holds with its dims in the
other order: that is read whole and turned in memory. Nothing is verified, as the folder has no checksums.
"""

from functools import cached_property

import numpy as np

from ckptkit.foreign.hf_contents import FILES, Contents
from ckptkit.format.root import Root
from ckptkit.io.blocks import Bytes, copy_many
from ckptkit.io.data_files import DataReader, open_reader
from ckptkit.loading.reader import CheckpointReader
from ckptkit.model.box import Box
from ckptkit.model.chunk_table import ChunkTable, Ints
from ckptkit.model.layout import ParallelLayout
from ckptkit.model.tensor import ITEMSIZE
from ckptkit.plan.load_plan import LoadPlan
from ckptkit.plan.stored import StoredChunks
from threefold.storage import Storage


class HfReader(CheckpointReader):
    """The tensors of a folder under the names of a run; use it in a `with`.

    Memory beside what is read into: the largest turned tensor twice, and that of GPT-2's fused q, k and v once more.
    """

    def __init__(self, storage: Storage, contents: Contents, root: Root, url: str) -> None:
        super().__init__(storage, root.step, root=root)
        self.url = url
        self._sizes = {**contents.weights, **contents.files}
        self._names = list(self._sizes)
        self._rows = {row.name: row for row in contents.rows}
        self._tensors = contents.tensors
        self._turned: list[str] = []  # the tensors of the parts behind the files
        self._kept: dict[str, Bytes] = {}  # what was read or turned last
        self._readers: dict[str, DataReader] = {}

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

    def attempt_for(self, layout: ParallelLayout) -> str:
        """Return for an import the attempt of the folder's root, which follows from its files."""
        return self.root.attempt if layout == ParallelLayout() else super().attempt_for(layout)

    @property
    def bytes_read(self) -> int:
        """Bytes of files read so far."""
        return sum(reader.bytes_read for reader in self._readers.values())

    def plan(self, wanted: ChunkTable) -> LoadPlan:
        """Return the copies that fill wanted chunks."""
        return self._planned(wanted, self.stored)

    def fetch(self, plan: LoadPlan, addresses: Ints) -> None:
        """Make the copies of a plan, each to an address of its own."""
        rows = np.stack([plan.source, plan.size, addresses], axis=1).astype(np.uint64)
        parts, first = np.unique(plan.part, return_index=True)
        ends = [*first[1:].tolist(), len(plan)]
        for part, start, stop in zip(parts.tolist(), first.tolist(), ends, strict=True):
            if part < len(self._names):
                self._reader(self._names[part]).read(rows[start:stop], num_threads=self.num_threads)
                continue
            values = self._turn(self._turned[part - len(self._names)])
            copies = rows[start:stop, [0, 2, 1]]
            copies[:, 0] += np.uint64(values.ctypes.data)
            copy_many(copies)

    def close(self) -> None:
        """Close all files."""
        while self._readers:
            self._readers.popitem()[1].close()

    def _reader(self, name: str) -> DataReader:
        if name not in self._readers:
            self._readers[name] = open_reader(self.storage, name, self._sizes[name], None)
        return self._readers[name]

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
