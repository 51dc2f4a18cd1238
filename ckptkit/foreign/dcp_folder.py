"""A folder that torch.distributed.checkpoint wrote, with the face of a run of one step: `dcp:FOLDER`, on any storage.

Tensors go by DCP's flat names, whole. What DCP pickled, such as a learning rate, is a tensor of opaque bytes: nothing
here unpickles it. The folder has no checksums, so its bytes are read unverified. torch is not needed.
"""

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

from ckptkit.foreign.dcp_metadata import FILE, DcpChunk, DcpContents, read_metadata
from ckptkit.foreign.folder import ForeignFolder
from ckptkit.foreign.restricted_pickle import MAX_BYTES
from ckptkit.foreign.stored_reader import Found, StoredReader, table_of
from ckptkit.foreign.torch_zip import read_tensor
from ckptkit.format.dcp_state import METADATA, DcpState
from ckptkit.format.root import Root
from ckptkit.io.blocks import shown_names
from ckptkit.io.torch_tensors import STORED
from ckptkit.model.box import Box
from ckptkit.model.layout import ParallelLayout
from threefold.cli import log
from threefold.errors import CheckFailed, listed

NUM_THREADS = 8


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

    def open(self, step: int, exchange: object = None) -> StoredReader:
        """Return a reader, for a `with`; the ranks of an exchange read each for itself."""
        contents, root, sizes = self.contents, self.root(step), self.sizes
        wanted = [(name, chunk) for name, tensor in contents.tensors.items() for chunk in tensor.chunks]
        with ThreadPoolExecutor(NUM_THREADS) as pool:  # reads the ends of each chunk, where its description is
            found = list(pool.map(lambda each: self._found(*each), wanted))
        return StoredReader(self.storage, root, self.url, sizes, found, contents.blobs)

    def _found(self, name: str, chunk: DcpChunk) -> Found:
        """Return where a chunk's elements are; CheckFailed if the file does not hold what `.metadata` says."""
        tensor, place = self.contents.tensors[name], chunk.place
        found = read_tensor(self.storage, place.file, place.offset, place.length)
        if (found.dtype, found.shape) != (tensor.dtype, chunk.shape):
            there = f"{found.dtype} {list(found.shape)}, {FILE} says {name}, {tensor.dtype} {list(chunk.shape)}"
            raise CheckFailed(f"{self.url}/{place.file} at byte {place.offset:,} holds {there}")
        return Found(name, Box(chunk.offset, chunk.shape), place.file, found)

    def root(self, step: int, exchange: object = None) -> Root:
        """Return the root that a run has whose step this folder is."""
        contents = self.contents
        shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in contents.tensors.items()}
        tensors = table_of(self.url, shapes, {name: each.length for name, each in contents.blobs.items()})
        dtypes = {name: dtype for name, (dtype, _) in shapes.items() if dtype not in STORED}
        state = DcpState(contents.paths, frozenset(contents.blobs), dtypes)
        return Root(step, self.attempt, ParallelLayout(), 1, tensors, (), {METADATA: state.to_json()})

    @property
    def files(self) -> Collection[str]:
        """The files that are read."""
        return {FILE, *self.sizes}
