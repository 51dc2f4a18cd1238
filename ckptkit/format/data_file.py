"""DataFile: the layout of one data file, a valid safetensors file that any reader of that format opens.

8 bytes of header length, a JSON header padded with spaces so that the data section begins at a multiple of 4 KiB, then
the chunks back to back, nothing after. Keys are `name@k`, k counting the chunks of a tensor in the file; a chunk that
is its whole box keeps the box's shape, a range is stored 1-D.
"""

import struct
from dataclasses import dataclass

import numpy as np

from ckptkit.format.part_index import PartIndex
from ckptkit.io.blocks import Columns, num_granules
from ckptkit.io.sums import ChunkSums
from ckptkit.model.chunk_table import ChunkTable

DATA_ALIGNMENT = 4096
MAX_CHUNKS = 200_000  # a file: keeps the header under the 100 MB that safetensors readers accept


@dataclass(frozen=True, eq=False)
class DataFile:
    """The chunks of one data file in file order, and the bytes that come before them."""

    chunks: ChunkTable
    header: bytes

    @classmethod
    def of(cls, chunks: ChunkTable) -> "DataFile":
        """Lay out chunks in the given order; they must be widest dtype first, so that all elements are aligned."""
        assert len(chunks) <= MAX_CHUNKS, f"{len(chunks)} chunks in one file"
        assert (chunks.itemsize[1:] <= chunks.itemsize[:-1]).all(), "wide dtypes come first"
        return cls(chunks, _header(chunks))

    @property
    def data_bytes(self) -> int:
        """Bytes of the data section."""
        return int(self.chunks.size_bytes.sum())

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + self.data_bytes

    def index(self, checksums: Columns, sums: Columns | None = None) -> PartIndex:
        """Return the part index that goes with the file, given its granules' checksums and its tensors' sums."""
        return PartIndex(self.chunks, len(self.header), self.size_bytes, checksums, sums)

    def draft_index(self) -> PartIndex:
        """Return the part index before anything is written: all checksums and sums are zero."""
        sums = np.zeros(len(self.chunks.names), np.uint64)
        return self.index(np.zeros(num_granules(self.size_bytes), np.uint64), sums)

    def new_sums(self) -> ChunkSums:
        """Return the sums of the file's tensors, to which nothing is added yet."""
        return ChunkSums(self.chunks, len(self.header))


def _header(chunks: ChunkTable) -> bytes:
    counts = [0] * len(chunks.names)
    names, dtypes = chunks.tensors.json_names, chunks.dtypes
    shapes: dict[tuple[int, ...], str] = {}  # boxes of one shape are many
    entries, at = ['"__metadata__":{"ckptkit":"1"}'], 0
    num_elements = chunks.stop - chunks.start
    is_whole = num_elements == np.prod(chunks.shape, axis=1, dtype=np.int64)
    skip = chunks.shape.shape[1] - chunks.tensors.num_dims[chunks.tensor]
    boxes = zip(skip.tolist(), *chunks.shape.T.tolist(), strict=True)
    columns = (chunks.tensor, is_whole, num_elements, chunks.size_bytes)
    for box, tensor, whole, numel, size in zip(boxes, *(column.tolist() for column in columns), strict=True):
        if whole and box not in shapes:
            shapes[box] = ",".join(map(str, box[1 + box[0] :]))
        entries.append(
            f'{names[tensor][:-1]}@{counts[tensor]}":{{"dtype":"{dtypes[tensor]}",'
            f'"shape":[{shapes[box] if whole else numel}],"data_offsets":[{at},{at + size}]}}'
        )
        counts[tensor] += 1
        at += size
    text = ("{" + ",".join(entries) + "}").encode()
    text += b" " * (-(8 + len(text)) % DATA_ALIGNMENT)
    return struct.pack("<Q", len(text)) + text
