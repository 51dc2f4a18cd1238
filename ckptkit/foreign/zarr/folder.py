"""A local folder of Zarr arrays (version 2 or 3, OCDBT too), with the face of a run of one step: `tensorstore:FOLDER`.

The package tensorstore reads it, an extra: any codec and chunking. Each array is a tensor under its path, in ranges
of rows that are read whole. What `ckptkit export --to tensorstore` wrote has its placements and metadata again.

In Zarr a chunk that is not there is one of fill values, an array that is not there none, and so is a lost file. Our own
folders name all that they have, and are compared with the certificate of the save. Of others each missing chunk is
counted, by the names that are listed, and refused unless it is allowed.
"""

import itertools
import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ckptkit.foreign.checks import FETCH, words_of
from ckptkit.foreign.folder import NOTE, FolderFiles, FolderSource, ForeignFolder
from ckptkit.format.root import Root
from ckptkit.format.tensor_rows import check_tensor, read_tensors
from ckptkit.io.blocks import Bytes
from ckptkit.io.torch_tensors import STORED
from ckptkit.model.layout import ParallelLayout
from ckptkit.model.tensor import Box, Placement, TensorInfo
from ckptkit.plan.stored import StoredChunks
from threefold.cli import log
from threefold.errors import CheckFailed, UserError, listed, quoted
from threefold.packages import needed_for
from threefold.storage.folders import local_root

NUM_THREADS, ROWS_BYTES = 8, 64 << 20
SAFE_CHUNK_BYTES, MAX_RATIO = 256 << 20, 1024  # of what is unpacked to all bytes of a folder
VERSION = 2  # of what our exports say; 1 had no certificate, and arrays did not say whose they are
CONSOLIDATED = ".zmetadata"
CHUNK = re.compile(r"c|[0-9]+(?:\.[0-9]+)*")  # the last words of a chunk's key
CHUNK_KEY = re.compile(r"c|(?:c[./])?[0-9]+(?:[./][0-9]+)*")  # behind the array's path
OCDBT, ATTRIBUTES = "manifest.ocdbt", "threefold"
DESCRIPTIONS = {"zarr.json": "zarr3", ".zarray": "zarr"}


Ints = tuple[int, ...]


@dataclass(frozen=True)
class Contents:
    """What a folder holds: an open array for each tensor, and what a run knew beside values, if one wrote it."""

    arrays: Mapping[str, Any]
    known: Mapping[str, Any]
    stored: Mapping[str, Collection[Ints]]  # the numbers of the chunks that are there, or of the shards

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """Return the arrays as whole tensors; KeyError for one of a dtype that no step can hold."""
        return {
            name: TensorInfo(name, STORED[each.dtype.name], tuple(each.shape), Placement("first"))
            for name, each in self.arrays.items()
        }


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
            read = {*described, CONSOLIDATED}.intersection(keys)
            texts = {key: json.loads(store.read(key).result().value) for key in sorted(read)}
            arrays = {key: each for key, each in described.items() if texts[key].get("node_type") != "group"}
            with ThreadPoolExecutor(NUM_THREADS) as pool:
                opened = pool.map(
                    lambda each: tensorstore.open(
                        {"driver": DESCRIPTIONS[each[2]], "kvstore": f"{base}{each[0]}{each[1]}"}, open=True
                    ).result(),
                    arrays.values(),
                )
                by_path = {path or "array": array for (path, _, _), array in zip(arrays.values(), opened, strict=True)}
            known = texts.get("zarr.json", {}).get("attributes", {}).get(ATTRIBUTES, {})
            are_ours = any(ATTRIBUTES in texts[key].get("attributes", {}) for key in arrays)
            lost = lost_arrays(keys, by_path, [texts.get(CONSOLIDATED, {}), texts.get("zarr.json", {})])
        except (AttributeError, OSError, RecursionError, TypeError, UnicodeDecodeError, ValueError) as error:
            text = f"{self.storage.url} is not a folder of sound Zarr arrays: {words_of(error)}"
            raise CheckFailed(text, hint=FETCH) from None
        if self.storage.info(NOTE) is not None:
            text = f"{self.storage.url} holds an export that is not finished"
            raise CheckFailed(text, hint="repeat the call of ckptkit export that began it")
        if lost:
            raise CheckFailed(f"{self.storage.url} lacks the descriptions of arrays:{listed(lost)}", hint=FETCH)
        if not by_path:
            raise CheckFailed(f"{self.storage.url} holds no Zarr array", hint="name the folder of zarr.json or .zarray")
        if are_ours and not known:
            text = f"{self.storage.url} lacks the zarr.json of the folder, which names all arrays of an export"
            raise CheckFailed(text, hint="fetch the folder again, or export the step again")
        return Contents(by_path, known, chunks_by_array(keys, by_path))

    @cached_property
    def chunks(self) -> None:
        """Look once whether all chunks are there; refuse missing ones, or say that they are read as fill values."""
        arrays, is_own = self.contents.arrays, bool(self.contents.known)
        self._check_chunk_sizes()
        try:
            with ThreadPoolExecutor(NUM_THREADS) as pool:
                counted = pool.map(lambda name: missing_chunks(arrays[name], self.contents.stored[name]), arrays)
                numbers = zip(arrays, counted, strict=True)
                missing = {name: number for name, number in numbers if number[0]}
        except (OSError, ValueError) as error:  # of the index of a shard
            text = f"{self.storage.url} has an array whose chunks cannot be counted: {words_of(error)}"
            raise CheckFailed(text, hint=FETCH) from None
        if not missing:
            return
        num_chunks = sum(number for number, _ in missing.values())
        parts = [f"{name}: {number:,} of {of_all:,}" for name, (number, of_all) in missing.items()]
        what = f"{num_chunks:,} chunk{'s' if num_chunks > 1 else ''}"
        if is_own:
            text = f"{self.storage.url} lacks {what} of an export, which has them all:{listed(parts)}"
            raise CheckFailed(text, hint="fetch the folder again, or export the step again")
        if not self.allows_missing_chunks:
            text = f"{self.storage.url} lacks {what}, which were lost or hold fill values alone:{listed(parts)}"
            command = f"ckptkit import {quoted(self.storage.url)} RUN --from tensorstore --allow-missing-chunks"
            raise UserError(text, hint=f"if the program that wrote it leaves those out: {command}")
        log(f"warning: {self.url}: {what} that {'are' if num_chunks > 1 else 'is'} not there read as fill values")

    def _check_chunk_sizes(self) -> None:
        """Raise CheckFailed if a chunk, which is unpacked whole, is large beside all that the folder has."""
        limit = max(SAFE_CHUNK_BYTES, MAX_RATIO * sum(info.size_bytes for info in self.storage.list()))
        for name, array in self.contents.arrays.items():
            shape = array.chunk_layout.read_chunk.shape or array.shape
            size_bytes = math.prod(step or size for step, size in zip(shape, array.shape, strict=True))
            size_bytes *= array.dtype.numpy_dtype.itemsize
            if size_bytes > limit:
                text = f"{self.storage.url}: {name} has chunks of {size_bytes:,} bytes, more than {limit:,}"
                raise CheckFailed(text, hint=FETCH)

    @property
    def files(self) -> Collection[str]:
        """The files that are read."""
        return [info.key for info in self.storage.list()]

    def open(self, step: int, exchange: object = None) -> FolderSource:
        """Return a reader, for a `with`; the ranks of an exchange read each for itself."""
        root, files = self.root(step), FolderFiles(self.storage, {})
        return FolderSource(root, self.url, files, TensorstoreParts(root, self.url, files, self.contents.arrays))

    def root(self, step: int, exchange: object = None) -> Root:
        """Return the root that a run has whose step this folder is."""
        arrays, known = self.contents.arrays, self.contents.known
        unknown = [f"{name}: {each.dtype.name}" for name, each in arrays.items() if each.dtype.name not in STORED]
        if unknown:
            raise UserError(f"{self.url} has arrays of dtypes that no step can hold:{listed(unknown)}")
        _ = self.chunks
        tensors = self.contents.tensors
        try:
            for info in tensors.values():
                check_tensor(info)
            if known:
                placed = read_tensors(known["tensors"], 2)
                self._check_arrays(placed, tensors)
                return Root(
                    step, self.attempt, ParallelLayout(), int(known["num_layers"]), placed, (), known["metadata"],
                    certificate=known.get("certificate"),
                )  # fmt: skip
        except CheckFailed:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{self.url} has an array that no step can hold: {words_of(error)}") from None
        return Root(step, self.attempt, ParallelLayout(), 1, tensors, (), {})

    def _check_arrays(self, placed: Mapping[str, TensorInfo], present: Mapping[str, TensorInfo]) -> None:
        """Raise CheckFailed if the arrays of an export are not those that it wrote."""
        exported = {name: (info.dtype, info.shape) for name, info in placed.items() if not info.placement.tied_to}
        faults = [f"{name}: lost" for name in exported if name not in present]
        faults += [f"{name}: not of the export" for name in present if name not in exported]
        faults += [
            f"{name}: {info.dtype} {list(info.shape)}, exported was {exported[name][0]} {list(exported[name][1])}"
            for name, info in present.items()
            if exported.get(name, (info.dtype, info.shape)) != (info.dtype, info.shape)
        ]
        if faults:
            text = f"{self.storage.url} does not hold the arrays of its export:{listed(faults)}"
            raise CheckFailed(text, hint="fetch the folder again, or export the step again")


def lost_arrays(keys: Collection[str], arrays: Collection[str], described: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the arrays of which there are chunks and no description, or that a list of the folder names beside.

    With an array `w` the key `w/c/0/1` is a chunk of it; without one `w` is lost.
    """
    lost = set()
    for key in keys:
        words = key.split("/")
        is_chunk = CHUNK.fullmatch(words[-1]) and not any("/".join(words[:n]) in arrays for n in range(1, len(words)))
        if is_chunk and "array" not in arrays:
            while words and CHUNK.fullmatch(words[-1]):
                words.pop()
            lost.add("/".join(words) or "array")
    for each in described:
        inside = each.get("consolidated_metadata") or {}
        for path, one in {**each.get("metadata", {}), **inside.get("metadata", {})}.items():
            if path.endswith("/.zarray") or one.get("node_type") == "array":
                lost.add(path.removesuffix("/.zarray"))
    return sorted(lost - set(arrays))


def chunks_by_array(keys: Iterable[str], arrays: Collection[str]) -> dict[str, set[Ints]]:
    """Return the numbers of the chunks that have a key, by the array's path; those of shards where there are shards.

    With an array `w` the keys `w/c/0/1`, `w/0/1` and `w/0.1` are of its chunk (0, 1).
    """
    numbers: dict[str, set[Ints]] = {name: set() for name in arrays}
    for key in keys:
        words = key.split("/")
        above = (at for at in range(len(words) - 1, 0, -1) if "/".join(words[:at]) in numbers)
        at = next(above, 0)
        name, rest = ("/".join(words[:at]), "/".join(words[at:])) if at else ("array", key)
        if name in numbers and CHUNK_KEY.fullmatch(rest):
            numbers[name].add(tuple(int(word) for word in re.split("[./]", rest) if word != "c"))
    return numbers


def missing_chunks(array: Any, stored: Collection[Ints]) -> tuple[int, int]:
    """Return how many chunks of an array are not there, of all; inner chunks of shards count.

    `stored` are the numbers of the chunks, or shards, that have a key. Only shards with gaps are looked into.
    """
    shape, layout = array.shape, array.chunk_layout
    if 0 in shape or array.storage_statistics(query_fully_stored=True).result().fully_stored:
        return 0, 0
    outer, inner = (
        [step or size for step, size in zip(each.shape or shape, shape, strict=True)]
        for each in (layout.write_chunk, layout.read_chunk)
    )
    num_stored = 0
    for number in stored if shape else ():
        box = [(at * step, min((at + 1) * step, size)) for at, step, size in zip(number, outer, shape, strict=False)]
        if len(number) == len(shape) and all(start < stop for start, stop in box):
            num_stored += _num_of(box, inner) - (_gaps(array, box, inner) if outer != inner else 0)
    num_chunks = _num_of([(0, size) for size in shape], inner)
    return max(num_chunks - num_stored, 1), num_chunks


def _num_of(box: Sequence[tuple[int, int]], steps: Sequence[int]) -> int:
    """Return in how many chunks a box is that begins with one."""
    return math.prod(-(-(stop - start) // step) for (start, stop), step in zip(box, steps, strict=True))


def _gaps(array: Any, box: Sequence[tuple[int, int]], steps: Sequence[int]) -> int:
    """Return how many chunks of a shard are not there."""
    shard = array[tuple(slice(start, stop) for start, stop in box)]
    if shard.storage_statistics(query_fully_stored=True).result().fully_stored:
        return 0
    starts = itertools.product(*(range(start, stop, step) for (start, stop), step in zip(box, steps, strict=True)))
    ends = [stop for _, stop in box]
    return sum(
        array[tuple(slice(at, min(at + step, end)) for at, step, end in zip(start, steps, ends, strict=True))]
        .storage_statistics(query_not_stored=True).result().not_stored
        for start in starts
    )  # fmt: skip


class TensorstoreParts:
    """The tensors of a folder, as FolderParts. Memory beside what is read into: ranges of rows of 64 MiB, twice.

    Of chunks that are compressed the bytes read are those of their elements.
    """

    def __init__(self, root: Root, url: str, files: FolderFiles, arrays: Mapping[str, Any]) -> None:
        self._root, self._url, self._files, self._arrays = root, url, files, arrays
        self._rows: list[tuple[str, int, int]] = []
        self._kept: tuple[int, Bytes] = (-1, np.empty(0, np.uint8))

    @cached_property
    def stored(self) -> StoredChunks:
        """All ranges of rows, each a part of its own."""
        boxes: list[tuple[TensorInfo, Box, int, int]] = []
        for info in self._root.tensors.values():
            for start, stop in self._ranges(info) if info.placement.tied_to is None else ():
                offset = (start, *(0 for _ in info.shape[1:]))
                box = Box(offset, (stop - start, *info.shape[1:])) if info.shape else Box((), ())
                boxes.append((info, box, len(boxes), 0))
                self._rows.append((info.name, start, stop))
        return StoredChunks.of_boxes(boxes)

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
                raise CheckFailed(f"{self._url}: {name} cannot be read: {error}") from None
            self._kept = number, values.reshape(-1).view(np.uint8)
            self._files.other_bytes += values.nbytes
        return self._kept[1]
