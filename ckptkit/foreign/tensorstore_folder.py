"""A local folder of Zarr arrays (version 2 or 3, OCDBT too), with the face of a run of one step: `tensorstore:FOLDER`.

The package tensorstore reads it, an extra: any codec and chunking. Each array is a tensor under its path, in ranges
of rows that are read whole. What `ckptkit export --to tensorstore` wrote has its placements and metadata again.
"""

import json
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ckptkit.foreign.folder import ForeignFolder
from ckptkit.foreign.folder_reader import FolderReader
from ckptkit.format.root import Root
from ckptkit.format.tensor_rows import check_tensor, read_tensors
from ckptkit.io.blocks import Bytes
from ckptkit.io.torch_tensors import STORED
from ckptkit.model.box import Box
from ckptkit.model.chunk_table import ChunkTable
from ckptkit.model.layout import ParallelLayout
from ckptkit.model.placement import Placement
from ckptkit.model.tensor import TensorInfo
from ckptkit.plan.stored import StoredChunks
from threefold.errors import CheckFailed, UserError, listed
from threefold.packages import needed_for
from threefold.storage.folders import local_root

NUM_THREADS, ROWS_BYTES = 8, 64 << 20
OCDBT, ATTRIBUTES = "manifest.ocdbt", "threefold"
DESCRIPTIONS = {"zarr.json": "zarr3", ".zarray": "zarr"}


@dataclass(frozen=True)
class Contents:
    """What a folder holds: an open array for each tensor, and what a run knew beside values, if one wrote it."""

    arrays: Mapping[str, Any]
    known: Mapping[str, Any]


class TensorstoreFolder(ForeignFolder):
    """One folder, with the methods of a Run that holds one step, 0; nothing is read before the first of them."""

    scheme = "tensorstore:"

    @cached_property
    def contents(self) -> Contents:
        """Return what the folder holds; UserError or CheckFailed if it holds no arrays, or some of other dtypes."""
        with needed_for("tensorstore:FOLDER"):
            import tensorstore
        where = local_root(self.storage)
        if where is None:
            raise UserError(f"{self.storage.url} is not a local folder", hint="copy the folder to a local disk first")
        base = f"{where.absolute().as_uri()}/" + ("|ocdbt:" if self.storage.info(OCDBT) is not None else "")
        try:
            store = tensorstore.KvStore.open(base).result()
            keys = sorted(key.decode() for key in store.list().result())
            described = {key: key.rpartition("/") for key in keys if key.rpartition("/")[2] in DESCRIPTIONS}
            texts = {key: json.loads(store.read(key).result().value) for key in described}
            arrays = {key: each for key, each in described.items() if texts[key].get("node_type") != "group"}
            with ThreadPoolExecutor(NUM_THREADS) as pool:
                opened = pool.map(
                    lambda each: tensorstore.open(
                        {"driver": DESCRIPTIONS[each[2]], "kvstore": f"{base}{each[0]}{each[1]}"}, open=True
                    ).result(),
                    arrays.values(),
                )
                found = {path or "array": array for (path, _, _), array in zip(arrays.values(), opened, strict=True)}
        except (AttributeError, OSError, UnicodeDecodeError, ValueError) as error:
            raise CheckFailed(f"{self.storage.url} is not a folder of sound Zarr arrays: {error}") from None
        if not found:
            raise CheckFailed(f"{self.storage.url} holds no Zarr array", hint="name the folder of zarr.json or .zarray")
        known = texts.get("zarr.json", {}).get("attributes", {}).get(ATTRIBUTES, {})
        return Contents(found, known)

    @property
    def files(self) -> Collection[str]:
        """The files that are read."""
        return [info.key for info in self.storage.list()]

    def open(self, step: int, exchange: object = None) -> "TensorstoreReader":
        """Return a reader, for a `with`; the ranks of an exchange read each for itself."""
        return TensorstoreReader(self, self.root(step), self.contents.arrays)

    def root(self, step: int, exchange: object = None) -> Root:
        """Return the root that a run has whose step this folder is."""
        arrays, known = self.contents.arrays, self.contents.known
        unknown = [f"{name}: {each.dtype.name}" for name, each in arrays.items() if each.dtype.name not in STORED]
        if unknown:
            raise UserError(f"{self.url} has arrays of dtypes that no step can hold:{listed(unknown)}")
        tensors = {
            name: TensorInfo(name, STORED[each.dtype.name], tuple(each.shape), Placement("first"))
            for name, each in arrays.items()
        }
        try:
            for info in tensors.values():
                check_tensor(info)
            if known:
                placed = read_tensors(known["tensors"], 2)
                held = {name: (each.dtype, each.shape) for name, each in placed.items() if not each.placement.tied_to}
                if held == {name: (each.dtype, each.shape) for name, each in tensors.items()}:
                    return Root(
                        step, self.attempt, ParallelLayout(), int(known["num_layers"]), placed, (), known["metadata"]
                    )  # fmt: skip
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{self.url} has an array that no step can hold: {error}") from None
        return Root(step, self.attempt, ParallelLayout(), 1, tensors, (), {})


class TensorstoreReader(FolderReader):
    """The tensors of a folder; use it in a `with`. Memory beside what is read into: ranges of rows of 64 MiB, twice."""

    def __init__(self, folder: TensorstoreFolder, root: Root, arrays: Mapping[str, Any]) -> None:
        super().__init__(folder.storage, root, folder.url, {})
        self._arrays = arrays
        self._rows: list[tuple[str, int, int]] = []
        self._kept: tuple[int, Bytes] = (-1, np.empty(0, np.uint8))
        self._num_bytes = 0

    @property
    def bytes_read(self) -> int:
        """Bytes of elements read so far: what chunks that are compressed have on the disk is not counted."""
        return self._num_bytes

    @cached_property
    def stored(self) -> StoredChunks:
        """All ranges of rows, each a part of its own."""
        chunks = []
        for info in self.root.tensors.values():
            if info.placement.tied_to is not None:
                continue
            for start, stop in self._ranges(info):
                box = (
                    Box((start, *(0 for _ in info.shape[1:])), (stop - start, *info.shape[1:]))
                    if info.shape
                    else Box((), ())
                )
                chunks.append((info, box, 0, box.numel))
                self._rows.append((info.name, start, stop))
        parts = np.arange(len(chunks), dtype=np.int64)
        return StoredChunks(ChunkTable.of(chunks), parts, np.zeros_like(parts))

    def _ranges(self, info: TensorInfo) -> list[tuple[int, int]]:
        """Return ranges of a tensor's rows: whole chunks, as many as fit."""
        if not info.shape or not info.numel:
            return [(0, info.shape[0] if info.shape else 0)]
        rows, width = info.shape[0], info.size_bytes // info.shape[0]
        of_chunk = (self._arrays[info.name].chunk_layout.read_chunk.shape or (1,))[0] or 1
        step = max(ROWS_BYTES // (width * of_chunk), 1) * of_chunk
        return [(start, min(start + step, rows)) for start in range(0, rows, step)]

    def ordered(self, number: int) -> Bytes:
        """Return the bytes of a range of rows."""
        if self._kept[0] != number:
            name, start, stop = self._rows[number]
            array = self._arrays[name]
            try:
                values = np.ascontiguousarray((array[start:stop] if array.shape else array).read().result())
            except (OSError, ValueError) as error:
                raise CheckFailed(f"{self.url}: {name} cannot be read: {error}") from None
            self._kept = number, values.reshape(-1).view(np.uint8)
            self._num_bytes += values.nbytes
        return self._kept[1]
