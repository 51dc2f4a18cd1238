"""A folder that torch.distributed.checkpoint wrote, with the face of a run of one step: `dcp:FOLDER`, on any storage.

Tensors go by DCP's flat names, whole. What DCP pickled, such as a learning rate, is a tensor of opaque bytes: nothing
here unpickles it. The folder has no checksums, so its bytes are read unverified. torch is not needed.
"""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

import numpy as np

from ckptkit.foreign.dcp_metadata import FILE, DcpChunk, DcpContents, read_metadata
from ckptkit.foreign.folder import ATTEMPT, ForeignFolder
from ckptkit.foreign.folder_reader import FolderReader
from ckptkit.foreign.restricted_pickle import MAX_BYTES
from ckptkit.foreign.torch_zip import ITEMSIZES, StoredTensor, read_tensor
from ckptkit.format.dcp_state import METADATA, DcpState
from ckptkit.format.part_index import PartIndex
from ckptkit.format.root import Root
from ckptkit.format.tensor_rows import check_tensor
from ckptkit.io.blocks import Bytes, shown_names
from ckptkit.io.torch_tensors import DTYPES
from ckptkit.model.box import Box
from ckptkit.model.chunk_table import ChunkTable
from ckptkit.model.layout import ParallelLayout
from ckptkit.model.placement import Placement
from ckptkit.model.tensor import TensorInfo
from ckptkit.plan.cover import Cover
from ckptkit.plan.stored import StoredChunks
from threefold.cli import log
from threefold.errors import CheckFailed, UserError, listed

NUM_THREADS = 8
# torch's dtypes that are stored as they are; elements of others are bytes, with a dim more
STORED = {name: stored[0] for name, stored in DTYPES.items() if name != "uint16"}


class DcpFolder(ForeignFolder):
    """One folder, with the methods of a Run that holds one step, 0; nothing is read before the first of them."""

    scheme = "dcp:"

    @cached_property
    def contents(self) -> DcpContents:
        """Return what the folder holds; CheckFailed or UserError if it is not sound or not understood."""
        return self.read_contents()

    def read_contents(self) -> DcpContents:
        """Return what `.metadata` says."""
        where = f"{self.storage.url}/{FILE}"
        info = self.storage.info(FILE)
        if info is None:
            raise CheckFailed(f"{where} is missing", hint="name a folder that torch.distributed.checkpoint wrote")
        if info.size_bytes > MAX_BYTES:
            raise CheckFailed(f"{where} has {info.size_bytes:,} bytes, more than such a file may have")
        return read_metadata(self.storage.read(FILE), where)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Return the size of each file that holds something; CheckFailed names those that are missing or cut short."""
        chunks = [chunk.place for tensor in self.contents.tensors.values() for chunk in tensor.chunks]
        ends: dict[str, int] = {}
        for place in [*chunks, *self.contents.blobs.values()]:
            ends[place.file] = max(ends.get(place.file, 0), place.offset + place.length)
        found = {info.key: info.size_bytes for info in self.storage.list()}
        faults = [
            f"{name}: {'missing' if name not in found else f'{found[name]:,} bytes'}, {end:,} bytes are named"
            for name, end in ends.items()
            if found.get(name, -1) < end
        ]
        if faults:
            raise CheckFailed(f"{self.storage.url} is not whole:{listed(faults)}", hint="fetch the folder again")
        if others := sorted(found.keys() - ends.keys() - {FILE}):
            log(f"warning: {self.url} holds what is not read: {shown_names(others)}")
        return {name: found[name] for name in ends}

    def open(self, step: int, exchange: object = None) -> "DcpFolderReader":
        """Return a reader, for a `with`; the ranks of an exchange read each for itself."""
        return DcpFolderReader(self, self.root(step))

    def root(self, step: int, exchange: object = None) -> Root:
        """Return the root that a run has whose step this folder is."""
        contents, dtypes, infos, faults = self.contents, dict[str, str](), list[TensorInfo](), list[str]()
        for name, tensor in contents.tensors.items():
            stored = STORED.get(tensor.dtype)
            if stored is None:
                dtypes[name] = tensor.dtype
            shape = tensor.shape if stored else (*tensor.shape, ITEMSIZES[tensor.dtype])
            infos.append(TensorInfo(name, stored or "U8", shape, Placement("first")))
        infos += [TensorInfo(name, "U8", (each.length,), Placement("first")) for name, each in contents.blobs.items()]
        for info in infos:
            try:
                check_tensor(info)
            except ValueError as error:
                faults.append(str(error))
        if faults:
            raise UserError(f"{self.url} has tensors that no step can hold:{listed(faults)}")
        state = DcpState(contents.paths, frozenset(contents.blobs), dtypes)
        tensors = {info.name: info for info in infos}
        return Root(step, self.attempt, ParallelLayout(), 1, tensors, (), {METADATA: state.to_json()})

    @cached_property
    def attempt(self) -> str:
        """Return the name that every import of this folder, as it is now, has on a run's storage."""
        state = hashlib.sha256(self.storage.url.encode())
        for name in sorted({FILE, *self.sizes}):
            state.update(repr(self.storage.info(name)).encode())
        return f"{ATTEMPT}-{state.hexdigest()[:12]}"


class DcpFolderReader(FolderReader):
    """The tensors of a folder; use it in a `with`. Memory beside what is read into: the largest turned chunk twice."""

    def __init__(self, folder: DcpFolder, root: Root) -> None:
        super().__init__(folder.storage, root, folder.url, folder.sizes)
        self._contents = folder.contents
        self._turned: list[tuple[str, StoredTensor]] = []  # the file and place of each part behind the files
        self._kept: tuple[int, Bytes] = (-1, np.empty(0, np.uint8))
        self._check()

    @cached_property
    def stored(self) -> StoredChunks:
        """All chunks: the part and the place of each; reads the ends of each, where its description is."""
        tensors = self._contents.tensors
        wanted = [(name, chunk) for name, tensor in tensors.items() for chunk in tensor.chunks]
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            found = list(pool.map(lambda each: self._read(*each), wanted))
        chunks, parts, offsets = [], [], []
        for (name, chunk), place in zip(wanted, found, strict=True):
            info, shape, offset = self.root.tensors[name], chunk.shape, chunk.offset
            if len(info.shape) > len(shape):
                shape, offset = (*shape, info.shape[-1]), (*offset, 0)
            box = Box(offset, shape)
            chunks.append((info, box, 0, box.numel))
            part, at = self._names.index(chunk.place.file), place.offset
            if not place.is_row_major:
                self._turned.append((chunk.place.file, place))
                part, at = len(self._names) + len(self._turned) - 1, 0
            parts.append(part)
            offsets.append(at)
        for name, blob in self._contents.blobs.items():
            info = self.root.tensors[name]
            chunks.append((info, Box((0,), info.shape), 0, info.numel))
            parts.append(self._names.index(blob.file))
            offsets.append(blob.offset)
        table = ChunkTable.of(chunks)
        order = np.argsort(table.tensor, kind="stable")
        return StoredChunks(table, np.array(parts, np.int64), np.array(offsets, np.int64)).take(order)

    def ordered(self, number: int) -> Bytes:
        """Return the bytes of a chunk whose elements are stored in another order."""
        if self._kept[0] != number:
            file, place = self._turned[number]
            size = ITEMSIZES[place.dtype]
            raw = np.empty(place.end - place.offset, np.uint8)
            self._reader(file).read([(place.offset, len(raw), raw.ctypes.data)], num_threads=self.num_threads)
            strides = [step * size for step in place.stride]
            elements = raw[: len(raw) // size * size].view(f"V{size}")
            there = np.lib.stride_tricks.as_strided(elements, place.shape, strides, writeable=False)
            self._kept = number, np.ascontiguousarray(there).reshape(-1).view(np.uint8)
        return self._kept[1]

    def _read(self, name: str, chunk: DcpChunk) -> StoredTensor:
        tensor, place = self._contents.tensors[name], chunk.place
        found = read_tensor(self.storage, place.file, place.offset, place.length)
        if (found.dtype, found.shape) != (tensor.dtype, chunk.shape):
            there = f"{found.dtype} {list(found.shape)}, {FILE} says {name}, {tensor.dtype} {list(chunk.shape)}"
            raise CheckFailed(f"{self.url}/{place.file} at byte {place.offset:,} holds {there}")
        return found

    def _check(self) -> None:
        """CheckFailed if the chunks do not hold each element once."""
        stored = self.stored
        index = PartIndex(stored.chunks, 0, 0, np.empty(0, np.uint64))
        cover = Cover(list(self.root.tensors.values()))
        cover.add(index, self.url)
        cover.check(self.url, lambda: iter([(0, index)]))
