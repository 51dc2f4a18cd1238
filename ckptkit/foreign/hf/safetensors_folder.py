"""A folder of safetensors files, its tensors by their own names: `safetensors:FOLDER`, or one FILE, on any storage.

Nothing is asked of a config.json, so the folder may hold any model. Each tensor is whole, for the first stage.
"""

import os
import re
from collections.abc import Mapping
from functools import cached_property

from ckptkit.foreign.hf.contents import FILES, INDEX, MAX_FILE_BYTES, WEIGHTS, Contents, indexed
from ckptkit.foreign.hf.folder import HfFolder
from ckptkit.foreign.hf.model_table import Row
from ckptkit.foreign.safetensors_file import ForeignTensor, read_file
from ckptkit.io.blocks import shown_names
from ckptkit.model.placement import Placement
from ckptkit.model.tensor import MAX_NAME_BYTES
from threefold.cli import log
from threefold.errors import CheckFailed, UserError, listed
from threefold.storage import Storage, open_storage

SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
OF_SEVERAL = re.compile(r"(.+)-\d{5}-of-(\d{5})")  # the stem and the number of files that are one model
WEIGHTS_OF_OTHERS = (".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx", ".ckpt", ".tflite")
METADATA = "safetensors"  # of a step: how the files were called


class SafetensorsFolder(HfFolder):
    """One folder or file, with the methods of a Run that holds one step, 0; read at the first of them."""

    scheme = "safetensors:"

    @cached_property
    def storage(self) -> Storage:
        """Return the storage of the folder, opened at first use."""
        return open_storage(os.path.dirname(self._place) or "." if self._file else self._place)

    @cached_property
    def _file(self) -> str | None:
        """The file that the address names; None if it names a folder."""
        is_file = self._place.endswith(SUFFIX) and not os.path.isdir(self._place)
        return os.path.basename(self._place) if is_file else None

    @cached_property
    def contents(self) -> Contents:
        """Return what the folder holds, or the file alone; CheckFailed or UserError if it is not sound."""
        sizes = {info.key: info.size_bytes for info in self.storage.list() if "/" not in info.key}
        stem, tensors, weights = _weights(
            self.storage, [self._file] if self._file else list(sizes), is_file=self._file is not None
        )
        if misnamed := [name for name in tensors if name.startswith(FILES)]:
            raise UserError(f"{self.storage.url} has tensors whose names begin as those of files do:{listed(misnamed)}")
        files = {} if self._file else _files(self.storage.url, sizes, weights)
        rows = tuple(Row(name, name, each.shape, Placement("first")) for name, each in tensors.items())
        return Contents(rows, tensors, weights, files, 1, {METADATA: {"stem": stem}})


def _weights(
    storage: Storage, keys: list[str], *, is_file: bool
) -> tuple[str, dict[str, ForeignTensor], dict[str, int]]:
    """Return what the names of the files of one model begin with, its tensors, and the size of each file."""
    indices = [INDEX] if INDEX in keys else [key for key in keys if key.endswith(INDEX_SUFFIX)]
    if WEIGHTS not in keys and len(indices) == 1:
        return indices[0].removesuffix(INDEX_SUFFIX), *indexed(storage, indices[0])
    files = [WEIGHTS] if WEIGHTS in keys else sorted(key for key in keys if key.endswith(SUFFIX))
    stems = {_stem(file, len(files)) for file in files}
    if not files:
        raise CheckFailed(f"{storage.url} has no file *{SUFFIX}", hint="name a folder of safetensors files, or a file")
    if not is_file and (lacking := _lacking(files)):
        text = f"{storage.url} holds {len(files)} of the {len(files) + len(lacking)} files of a model, without "
        raise CheckFailed(text + shown_names(lacking), hint="copy those too, or name one of the files to take it alone")
    if len(stems) > 1:
        text = f"{storage.url} holds safetensors files of several models: {shown_names(files)}"
        raise UserError(text, hint="name one of the files in place of the folder")
    tensors: dict[str, ForeignTensor] = {}
    sizes = {}
    for file in files:
        found, sizes[file], _ = read_file(storage, file)
        if doubles := sorted(found.keys() & tensors.keys()):
            raise CheckFailed(f"{storage.url}: {doubles[0]} is in {tensors[doubles[0]].file} and in {file}")
        tensors |= found
    return stems.pop(), tensors, sizes


def _stem(file: str, num_files: int) -> str:
    """Return what a file's name begins with: `model` of `model-00001-of-00003.safetensors` where three are there."""
    name = file.removesuffix(SUFFIX)
    match = OF_SEVERAL.fullmatch(name)
    return match[1] if match and int(match[2]) == num_files else name


def _lacking(files: list[str]) -> list[str]:
    """Return the files of one model that are not there, by the numbers in the names of those that are."""
    matches = [OF_SEVERAL.fullmatch(file.removesuffix(SUFFIX)) for file in files]
    models = {match.groups() if match else ("", "0") for match in matches}
    stem, total = next(iter(models))
    if len(models) > 1 or len(files) >= int(total):
        return []
    return [name for at in range(int(total)) if (name := f"{stem}-{at + 1:05}-of-{total}{SUFFIX}") not in files]


def _files(url: str, sizes: Mapping[str, int], weights: Mapping[str, int]) -> dict[str, int]:
    """Return the files that a run carries: all at the top that are not empty, large, hidden or weights."""
    others = {name: size for name, size in sizes.items() if name not in weights and not name.endswith(INDEX_SUFFIX)}
    files = {
        name: size
        for name, size in others.items()
        if 0 < size <= MAX_FILE_BYTES
        and not name.startswith(".")
        and not name.endswith((SUFFIX, *WEIGHTS_OF_OTHERS))
        and len((FILES + name).encode()) <= MAX_NAME_BYTES
    }
    if left := sorted(name for name in others.keys() - files.keys() if others[name] and not name.startswith(".")):
        log(f"warning: {url} holds what is not read: {shown_names(left)}")
    return files
