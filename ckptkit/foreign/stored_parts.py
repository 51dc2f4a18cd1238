"""StoredParts: where a folder whose files torch wrote has its tensors and raw bytes.

What the files hold with its elements in another order is read whole and turned in memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ckptkit.foreign.folder import FolderFiles, FolderSource
from ckptkit.foreign.torch_files.archive import ITEMSIZES, Ints, StoredTensor
from ckptkit.format.part_index import PartIndex
from ckptkit.format.root import Root
from ckptkit.format.tensor_rows import check_tensor
from ckptkit.io.blocks import Bytes
from ckptkit.io.torch_tensors import STORED
from ckptkit.model.tensor import Box, Placement, TensorInfo
from ckptkit.plan.cover import Cover
from ckptkit.plan.stored import StoredChunks
from threefold.errors import UserError, listed
from threefold.storage import Storage


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes [offset, offset + length) of a file."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Found:
    """A box of a tensor of a run, in torch's dims, and where its elements are."""

    name: str
    box: Box
    file: str
    place: StoredTensor


def table_of(url: str, tensors: Mapping[str, tuple[str, Ints]], raw: Mapping[str, int]) -> dict[str, TensorInfo]:
    """Return the tensor table of a folder, given torch's dtypes and shapes, and the sizes of raw bytes.

    UserError lists what no step can hold.
    """
    infos, faults = list[TensorInfo](), list[str]()
    for name, (dtype, shape) in tensors.items():
        stored = STORED.get(dtype)
        infos.append(TensorInfo(name, stored or "U8", shape if stored else (*shape, ITEMSIZES[dtype]), FIRST))
    infos += [TensorInfo(name, "U8", (size,), FIRST) for name, size in raw.items()]
    for info in infos:
        try:
            check_tensor(info)
        except ValueError as error:
            faults.append(str(error))
    if faults:
        raise UserError(f"{url} has tensors that no step can hold:{listed(faults)}")
    return {info.name: info for info in infos}


FIRST = Placement("first")


def stored_source(
    storage: Storage, root: Root, url: str, sizes: Mapping[str, int], chunks: Sequence[Found],
    raw: Mapping[str, Place | bytes],
) -> FolderSource:  # fmt: skip
    """Return a folder open for planned reads; CheckFailed if it does not hold each element of its tensors once."""
    files = FolderFiles(storage, sizes)
    return FolderSource(root, url, files, StoredParts(root, url, files, chunks, raw))


class StoredParts:
    """The tensors of a folder, as FolderParts. Memory beside what is read into: the largest turned chunk twice."""

    def __init__(
        self, root: Root, url: str, files: FolderFiles, chunks: Sequence[Found], raw: Mapping[str, Place | bytes]
    ) -> None:
        """Take what was found; CheckFailed if it does not hold each element of the root's tensors once."""
        self._root, self._files = root, files
        self._behind: list[tuple[str, StoredTensor] | bytes] = []  # each part behind the files: turned, or made
        self._kept: tuple[int, Bytes] = (-1, np.empty(0, np.uint8))
        stored = StoredChunks.of_boxes(self._boxes(chunks, raw))
        self.stored = stored.take(np.argsort(stored.chunks.tensor, kind="stable"))
        index = PartIndex(self.stored.chunks, 0, 0, np.empty(0, np.uint64))
        cover = Cover(list(root.tensors.values()))
        cover.add(index, url)
        cover.check(url, lambda: iter([(0, index)]))

    def _boxes(
        self, chunks: Sequence[Found], raw: Mapping[str, Place | bytes]
    ) -> Iterator[tuple[TensorInfo, Box, int, int]]:
        """Yield the box, the part and the place there of each chunk."""
        numbers = self._files.numbers
        for chunk in chunks:
            info, box, place = self._root.tensors[chunk.name], chunk.box, chunk.place
            if len(info.shape) > len(box.shape):
                box = Box((*box.offset, 0), (*box.shape, info.shape[-1]))
            is_plain = place.is_row_major
            yield info, box, *((numbers[chunk.file], place.offset) if is_plain else self._after((chunk.file, place)))
        for name, stored in raw.items():
            info = self._root.tensors[name]
            yield (
                info,
                Box.whole(info.shape),
                *(self._after(stored) if isinstance(stored, bytes) else (numbers[stored.file], stored.offset)),
            )

    def _after(self, part: tuple[str, StoredTensor] | bytes) -> tuple[int, int]:
        """Return the place of a part behind the files."""
        self._behind.append(part)
        return len(self._files.names) + len(self._behind) - 1, 0

    def ordered(self, number: int) -> Bytes:
        """Return the bytes of a chunk whose elements are stored in another order, or that no file has."""
        part = self._behind[number]
        if isinstance(part, bytes):
            return np.frombuffer(part, np.uint8)
        if self._kept[0] != number:
            file, place = part
            size = ITEMSIZES[place.dtype]
            raw = np.empty(place.end - place.offset, np.uint8)
            self._files.read(file, [(place.offset, len(raw), raw.ctypes.data)])
            strides = [step * size for step in place.stride]
            elements = raw[: len(raw) // size * size].view(f"V{size}")
            in_order = np.lib.stride_tricks.as_strided(elements, place.shape, strides, writeable=False)
            self._kept = number, np.ascontiguousarray(in_order).reshape(-1).view(np.uint8)
        return self._kept[1]
