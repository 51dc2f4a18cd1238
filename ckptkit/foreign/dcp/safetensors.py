"""Safetensors files of torch.distributed.checkpoint: of its Hugging Face writer, and `.distcp` files of that form.

A header's `__metadata__` says where each tensor of the file begins in the whole one. Nothing there says how large the
whole one is: `.metadata` does, or an index that names files of whole tensors.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from ckptkit.foreign.checks import FETCH, checked, row_of_sizes
from ckptkit.foreign.dcp.metadata import DcpChunk, DcpContents, DcpTensor, Ints
from ckptkit.foreign.hf.contents import INDEX, WEIGHTS, read_places
from ckptkit.foreign.safetensors_file import ForeignTensor, read_file
from ckptkit.foreign.stored_parts import Place
from ckptkit.foreign.torch_files.zip_reader import StoredTensor
from ckptkit.io.torch_tensors import NAMES
from threefold.errors import CheckFailed
from threefold.storage import Storage

SHARDING, SUFFIX = "DCP_SHARDING_INFO", ".safetensors"


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
