"""Folders of safetensors files, each with the face of a run of one step, on any storage.

`hf:FOLDER` is one as `transformers` saves it. What has its dims in the other order is turned in memory.
`safetensors:FOLDER`, or one FILE, has its tensors by their own names. Nothing is asked of a config.json, so it may hold
any model; each tensor is whole, for the first stage. They have no checksums, so their bytes are read unverified.
"""

import math
import os
import re
from collections.abc import Collection, Mapping
from functools import cached_property

import numpy as np

from ckptkit.foreign.folder import FolderFiles, FolderSource, ForeignFolder
from ckptkit.foreign.hf.contents import FILES, INDEX, MAX_FILE_BYTES, WEIGHTS, Contents, indexed, read_contents
from ckptkit.foreign.hf.model_table import Row
from ckptkit.foreign.safetensors_file import ForeignTensor, read_file
from ckptkit.format.root import Root
from ckptkit.io.blocks import Bytes, shown_names
from ckptkit.model.layout import ParallelLayout
from ckptkit.model.tensor import ITEMSIZE, MAX_NAME_BYTES, Box, Placement, TensorInfo
from ckptkit.plan.stored import StoredChunks
from ckptkit.runs.run import Run
from threefold.cli import log
from threefold.errors import CheckFailed, UserError, listed
from threefold.storage import Storage, open_storage

SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
OF_SEVERAL = re.compile(r"(.+)-\d{5}-of-(\d{5})")  # the stem and the number of files that are one model
WEIGHTS_OF_OTHERS = (".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx", ".ckpt", ".tflite")
METADATA = "safetensors"  # of a step: how the files were called


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
