"""Copy of one data file and its index between any two storages, byte for byte, verified while it passes.

What an earlier try left is kept if it is whole and right: it is made durable first, and then read from the disk.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial

import numpy as np
import numpy.typing as npt

from ckptkit.format.part_index import PartIndex
from ckptkit.io.blocks import Columns, shown_names
from ckptkit.io.data_files import open_reader, write_blocks
from ckptkit.io.double_buffer import Load, double_buffered
from ckptkit.io.sums import ChunkSums
from threefold.errors import CheckFailed, StorageError
from threefold.storage import Storage
from threefold.storage.local import keep_file

BLOCK_BYTES = 8 << 20  # two of them are in memory
NOT_AS_SAVED = "holds other values than were saved, by their sums"


def copy_part(
    blocks: Iterable[Columns], target: Storage, keys: tuple[str, str], index: PartIndex, index_file: bytes,
    *, num_threads: int = 1,
) -> tuple[int, int]:  # fmt: skip
    """Write a data file from blocks that reuse their memory, then its index; return the bytes copied, and those kept.

    `keys` are those of both files, and `index` is what the bytes `index_file` say.
    """
    data_key, index_key = keys
    sizes = {True: 0, False: 0}  # by whether the file was kept
    is_right = _is_kept(target, data_key) and is_whole(target, data_key, index)
    if not is_right:
        sums = None if index.sums is None else ChunkSums(index.chunks, index.data_offset)
        written = write_blocks(
            target, data_key, index.size_bytes, blocks, is_reused=True, num_threads=num_threads, sums=sums
        )
        if (written != index.checksums).any():
            raise StorageError(f"{target.url}/{data_key} was written with other bytes than were read")
        if wrong := unlike_saved(index, sums):
            raise CheckFailed(f"{target.url}/{data_key} {NOT_AS_SAVED}, in {shown_names(wrong)}")
    sizes[is_right] += index.size_bytes
    is_right = _is_kept(target, index_key) and target.read(index_key) == index_file
    if not is_right:
        target.write(index_key, index_file)
    sizes[is_right] += len(index_file)
    return sizes[False], sizes[True]


def loading(read: Callable[[npt.ArrayLike], None]) -> Load:
    """Return what fills a block of a data file by `read`, which takes rows of (offset, bytes, address)."""
    return lambda start, block: read([(start, len(block), block.ctypes.data)])


def verified_blocks(storage: Storage, key: str, index: PartIndex) -> Iterator[Columns]:
    """Yield the blocks of a data file, each verified against its index before it is handed out."""
    with closing(open_reader(storage, key, index.size_bytes, index.checksums)) as reader:
        yield from double_buffered(loading(partial(reader.read, num_threads=1)), index.size_bytes, BLOCK_BYTES)


def _is_kept(storage: Storage, key: str) -> bool:
    """Return whether an earlier try left a file; it is durable then, and the disk's bytes are read from now on."""
    if storage.info(key) is None:
        return False
    keep_file(storage, key)
    return True


def is_whole(storage: Storage, key: str, index: PartIndex) -> bool:
    """Return whether all bytes of a data file have the checksums of its index, and its values their sums."""
    sums, at = None if index.sums is None else ChunkSums(index.chunks, index.data_offset), 0
    try:
        for [(address, size)] in verified_blocks(storage, key, index):
            if sums is not None:
                sums.add_at(int(address), int(size), at)
            at += int(size)
    except (CheckFailed, StorageError):
        return False
    return not unlike_saved(index, sums)


def unlike_saved(index: PartIndex, sums: ChunkSums | None) -> tuple[str, ...]:
    """Return the tensors of a file whose values have other sums than its index says."""
    if sums is None or index.sums is None:
        return ()
    return tuple(index.chunks.names[tensor] for tensor in np.flatnonzero(sums.values != index.sums).tolist())
