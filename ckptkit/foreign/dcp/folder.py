"""Folders of torch.distributed.checkpoint, each with the face of a run of one step, on any storage.

`dcp:FOLDER` is what DCP wrote. Tensors go by its flat names, whole. What DCP pickled, such as a learning rate, is a
tensor of opaque bytes: nothing here unpickles it. Files may be zips of torch or safetensors, with `.metadata` or with
the index of whole tensors that the Hugging Face writer makes. A safetensors header's `__metadata__` says where each
tensor of the file begins in the whole one, and nothing there how large that is. The folder has no checksums, so its
bytes are read unverified. torch is not needed.

`torch_dist:FOLDER` is what megatron-core's dist_checkpointing wrote with that backend: a save of DCP, files beside it.
`metadata.json` names the backends. What all ranks have alike is pickled: in the save as `common_state/shard_0_1`, since
megatron-core 0.19, or in the file `common.pt`. Both files are opaque bytes here, `files/metadata.json` and so on.
"""

import json
import math
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from ckptkit.foreign.checks import FETCH, checked, checked_size, row_of_sizes, shown, size_of
from ckptkit.foreign.dcp.metadata import FILE, DcpChunk, DcpContents, DcpTensor, Ints, read_metadata
from ckptkit.foreign.folder import FolderSource, ForeignFolder
from ckptkit.foreign.hf.contents import FILES, INDEX, WEIGHTS, read_places
from ckptkit.foreign.safetensors_file import ForeignTensor, read_file
from ckptkit.foreign.stored_parts import Found, Place, stored_source, table_of
from ckptkit.foreign.torch_files.archive import StoredTensor, read_tensor
from ckptkit.foreign.torch_files.restricted_pickle import MAX_BYTES
from ckptkit.format.dcp_state import METADATA, DcpState
from ckptkit.format.root import Root
from ckptkit.io.blocks import shown_names
from ckptkit.io.torch_tensors import NAMES, STORED
from ckptkit.model.layout import ParallelLayout
from ckptkit.model.tensor import Box
from threefold.cli import log
from threefold.errors import CheckFailed, UserError, listed
from threefold.storage import Storage

SHARDING, SUFFIX = "DCP_SHARDING_INFO", ".safetensors"
NUM_THREADS = 8
CONFIG, COMMON = "metadata.json", "common.pt"
COMMON_STATE = "common_state/shard_0_1"  # in the save, in place of COMMON
BACKENDS = {
    "sharded_backend": "torch_dist", "sharded_backend_version": 1,
    "common_backend": "torch", "common_backend_version": 1,
}  # fmt: skip
MAX_FILE_BYTES = 256 << 20
HINT = "name a folder that megatron-core's dist_checkpointing wrote, iter_0000100 for instance"


@dataclass(frozen=True, slots=True)
class FileBox:
    """A box of a tensor as a file has it: where it begins in the whole one."""

    offset: Ints
    tensor: ForeignTensor

    @property
    def dtype(self) -> str:
        """Return torch's name of the dtype."""
        return NAMES[self.tensor.dtype]

    @property
    def place(self) -> StoredTensor:
        """Return where its elements are."""
        shape, start = self.tensor.shape, self.tensor.offset
        stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        return StoredTensor(self.dtype, shape, stride, start, start + self.tensor.size_bytes)


def read_parts(storage: Storage, key: str, start: int = 0) -> dict[str, FileBox]:
    """Return what a file holds from a byte on, by name; CheckFailed if it is not sound."""
    tensors, _, metadata = read_file(storage, key, start)
    with checked(f"{storage.url}/{key} does not say where its tensors begin as torch does", "fetch the file again"):
        described = json.loads(metadata.get(SHARDING, "{}")).items()
        offsets = {name: row_of_sizes(fields["saved_offsets"]) for name, fields in described}
        parts = {name: FileBox(offsets.get(name, (0,) * len(each.shape)), each) for name, each in tensors.items()}
        if any(len(part.offset) != len(part.tensor.shape) for part in parts.values()):
            raise ValueError("places of other dims than the tensors")
    return parts


def read_folder(storage: Storage) -> tuple[DcpContents, dict[str, dict[str, FileBox]]] | None:
    """Return what a folder of whole tensors holds that the Hugging Face writer made, and each file's parts.

    None if it is not such a folder; CheckFailed for shards of tensors whose size nothing says.
    """
    keys = [info.key for info in storage.list() if info.key.endswith(SUFFIX)]
    if not keys:
        return None
    if storage.info(INDEX) is None and keys != [WEIGHTS]:
        raise CheckFailed(
            f"{storage.url} holds safetensors files of shards and no {INDEX}: nothing says how large their tensors are",
            hint="save with HuggingFaceStorageWriter(path, save_distributed=True, enable_consolidation=True)",
        )
    places = read_places(storage) if keys != [WEIGHTS] or storage.info(INDEX) is not None else None
    files = {key: read_parts(storage, key) for key in sorted(set(places.values()) if places is not None else keys)}
    found = {name: key for key, parts in files.items() for name in parts}
    if places is not None and (wrong := sorted(places.items() ^ found.items())):
        raise CheckFailed(f"{storage.url}/{INDEX} and {wrong[0][1]} differ: {wrong[0][0]} is in one of them only")
    return DcpContents(_whole(storage, files), {}, None), files


def _whole(storage: Storage, files: Mapping[str, Mapping[str, FileBox]]) -> dict[str, DcpTensor]:
    """Return the tensors of some files, each whole in one of them."""
    tensors = {}
    for key, parts in files.items():
        for name, part in parts.items():
            if any(part.offset):
                text = f"{storage.url}/{key} holds {name} from {list(part.offset)} on, the rest is in no file"
                raise CheckFailed(text, hint=FETCH)
            shape, place = part.tensor.shape, Place(key, part.tensor.offset, part.tensor.size_bytes)
            tensors[name] = DcpTensor(part.dtype, shape, [DcpChunk(part.offset, shape, place)])
    return tensors


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


class TorchDistFolder(DcpFolder):
    """One folder, with the methods of a Run that holds one step, 0; nothing is read before the first of them."""

    scheme = "torch_dist:"

    @cached_property
    def contents(self) -> DcpContents:
        """Return what `.metadata` says, and the files beside it; CheckFailed or UserError if it is not understood."""
        sizes = {CONFIG: size_of(self.storage, CONFIG, MAX_FILE_BYTES, hint=HINT)}
        _check_backends(self.storage)
        contents, keys = self.read_contents(), [info.key for info in self.storage.list()]
        if COMMON in keys or COMMON_STATE not in contents.blobs:
            sizes[COMMON] = size_of(self.storage, COMMON, MAX_FILE_BYTES, hint=HINT)
        others = [key for key in keys if key not in (CONFIG, COMMON, FILE) and not key.endswith(".distcp")]
        if others:
            text = f"{self.storage.url} holds {others[0]}, which is not read"
            raise UserError(text, hint="save it by torch_dist alone")
        beside = {FILES + name: Place(name, 0, size) for name, size in sizes.items()}
        return replace(contents, blobs={**contents.blobs, **beside})


def _check_backends(storage: Storage) -> None:
    where = f"{storage.url}/{CONFIG}"
    with checked(f"{where} is not what megatron-core writes"):
        config = json.loads(storage.read(CONFIG))
        named = {key: config.get(key, BACKENDS[key]) for key in BACKENDS}
    if named != BACKENDS or "sharded_backend" not in config:
        wrong = ", ".join(f"{key} {shown(value)}" for key, value in named.items() if value != BACKENDS[key])
        text = f"{where} says {wrong or 'no backend'}, which is not read"
        raise UserError(text, hint="save it with --dist-ckpt-format torch_dist")
