"""A folder that torch.distributed.checkpoint wrote, with the face of a run of one step: `dcp:FOLDER`, on any storage.

Tensors go by DCP's flat names, whole. What DCP pickled, such as a learning rate, is a tensor of opaque bytes: nothing
here unpickles it. Files may be zips of torch or safetensors, with `.metadata` or with the index of whole tensors that
the Hugging Face writer makes. The folder has no checksums, so its bytes are read unverified. torch is not needed.
"""

from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from types import MappingProxyType

from ckptkit.foreign.checks import FETCH, checked_size
from ckptkit.foreign.dcp.metadata import FILE, DcpChunk, DcpContents, read_metadata
from ckptkit.foreign.dcp.safetensors import FileBox, read_folder, read_parts
from ckptkit.foreign.folder import ForeignFolder
from ckptkit.foreign.folder_source import FolderSource
from ckptkit.foreign.hf.contents import INDEX
from ckptkit.foreign.stored_parts import Found, stored_source, table_of
from ckptkit.foreign.torch_files.restricted_pickle import MAX_BYTES
from ckptkit.foreign.torch_files.zip_reader import read_tensor
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
    _parts: Mapping[str, Mapping[str, FileBox]] = MappingProxyType({})  # of files that are safetensors

    @cached_property
    def contents(self) -> DcpContents:
        """Return what the folder holds; CheckFailed or UserError if it is not sound or not understood."""
        return self.read_contents()

    def read_contents(self) -> DcpContents:
        """Return what `.metadata` says."""
        info, where = self.storage.info(FILE), f"{self.storage.url}/{FILE}"
        if info is None and (whole := read_folder(self.storage)) is not None:
            contents, self._parts = whole
            return contents
        hint = "name a folder that torch.distributed.checkpoint wrote"
        checked_size(where, None if info is None else info.size_bytes, MAX_BYTES, hint=hint)
        return read_metadata(self.storage.read(FILE), where)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Return the size of each file that holds something; CheckFailed names those that are missing or cut short."""
        chunks = [chunk.place for tensor in self.contents.tensors.values() for chunk in tensor.chunks]
        ends: dict[str, int] = {}
        for place in [*chunks, *self.contents.blobs.values()]:
            ends[place.file] = max(ends.get(place.file, 0), place.offset + place.length)
        stored = {info.key: info.size_bytes for info in self.storage.list()}
        faults = [
            f"{name}: {'missing' if name not in stored else f'{stored[name]:,} bytes'}, {end:,} bytes are named"
            for name, end in ends.items()
            if stored.get(name, -1) < end
        ]
        if faults:
            raise CheckFailed(f"{self.storage.url} is not whole:{listed(faults)}", hint=FETCH)
        if others := sorted(stored.keys() - ends.keys() - {FILE, INDEX}):
            log(f"warning: {self.url} holds what is not read: {shown_names(others)}")
        return {name: stored[name] for name in ends}

    def open(self, step: int, exchange: object = None) -> FolderSource:
        """Return a reader, for a `with`; the ranks of an exchange read each for itself."""
        contents, root, sizes = self.contents, self.root(step), self.sizes
        chunks = [(name, chunk) for name, tensor in contents.tensors.items() for chunk in tensor.chunks]
        self._parts = self._parts or self._of_safetensors()
        with ThreadPoolExecutor(NUM_THREADS) as pool:  # reads the ends of each chunk, where its description is
            places = list(pool.map(lambda named: self._found(*named), chunks))
        return stored_source(self.storage, root, self.url, sizes, places, contents.blobs)

    def _found(self, name: str, chunk: DcpChunk) -> Found:
        """Return where a chunk's elements are; CheckFailed if the file does not hold what `.metadata` says."""
        tensor, place = self.contents.tensors[name], chunk.place
        if (parts := self._parts.get(place.file)) is not None:
            part = parts.get(name)
            if part is None or part.offset != chunk.offset:
                what = "not there" if part is None else f"that from {list(part.offset)} on"
                text = f"{self.url}/{place.file}: {name} from {list(chunk.offset)} on, which {FILE} names, is {what}"
                raise CheckFailed(text, hint="torch keeps one chunk of a tensor in such a file: save as torch does")
            stored = part.place
        else:
            stored = read_tensor(self.storage, place.file, place.offset, place.length)
        if (stored.dtype, stored.shape) != (tensor.dtype, chunk.shape):
            what = f"{stored.dtype} {list(stored.shape)}, {FILE} says {name}, {tensor.dtype} {list(chunk.shape)}"
            raise CheckFailed(f"{self.url}/{place.file} at byte {place.offset:,} holds {what}")
        return Found(name, Box(chunk.offset, chunk.shape), place.file, stored)

    def _of_safetensors(self) -> dict[str, dict[str, FileBox]]:
        """Return the parts of the files that are safetensors, which follow what was pickled."""
        contents, starts = self.contents, dict[str, int]()
        files = {chunk.place.file for each in contents.tensors.values() for chunk in each.chunks}
        for place in contents.blobs.values():
            starts[place.file] = max(starts.get(place.file, 0), place.offset + place.length)

        def parts_of(file: str) -> dict[str, FileBox] | None:
            start = starts.get(file, 0)
            [head] = self.storage.read_ranges(file, [(start, start + 9)]) if self.sizes[file] >= start + 9 else [b""]
            # tensors begin with a header of safetensors, and not with a zip
            return read_parts(self.storage, file, start) if bytes(head[8:]) == b"{" else None

        with ThreadPoolExecutor(NUM_THREADS) as pool:  # two or three small requests a file
            found = zip(files, pool.map(parts_of, files), strict=True)
            return {file: parts for file, parts in found if parts is not None}

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
        return {FILE, *self.sizes} if self.storage.info(FILE) is not None else self.sizes
