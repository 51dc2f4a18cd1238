"""A step whose values were changed under right checksums, as no checksum can see."""

from dataclasses import replace

from ckptkit.format.keys import ROOT_KEY, step_folder
from ckptkit.format.root import Part
from ckptkit.io.blocks import checksums, xxh3_64
from ckptkit.io.sums import ChunkSums
from ckptkit.loading.reader import CheckpointReader
from ckptkit.loading.roots import read_root
from threefold.storage import Storage


def forge(storage: Storage, step: int, *, with_sums: bool, tensor: str | None = None) -> None:
    """Change the last byte of the first data file, or of what the first one with a tensor has of it.

    Checksums are made right, and sums too if asked to.
    """
    root, folder = read_root(storage, step), step_folder(step)
    with CheckpointReader(storage, step) as reader:
        found = [(part, reader.files.read_index(part)) for part in root.parts]
    part, index = next(each for each in found if tensor is None or tensor in each[1].chunks.names)
    data, at = bytearray(storage.read(f"{folder}/{part.data}")), -1
    if tensor is not None:
        row = index.chunks.tensor.tolist().index(index.chunks.names.index(tensor))
        at = int(index.offsets[row] + index.chunks.size_bytes[row]) - 1
    data[at] ^= 1
    sums = index.sums
    if with_sums:
        made = ChunkSums(index.chunks, index.data_offset)
        made.add(bytes(data), 0)
        sums = made.values
    text = replace(index, checksums=checksums(bytes(data)), sums=sums).to_bytes()
    storage.write(f"{folder}/{part.data}", bytes(data))
    storage.write(f"{folder}/{part.index}", text)
    changed = Part(part.data, len(data), part.index, len(text), xxh3_64(text))
    parts = tuple(changed if each == part else each for each in root.parts)
    storage.write(f"{folder}/{ROOT_KEY}", replace(root, parts=parts).to_bytes())
