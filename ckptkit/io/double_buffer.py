"""double_buffered: the blocks of a file, one made on a thread while the one before it is written."""

import mmap
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

import numpy as np

from ckptkit.io.blocks import Bytes, Columns

T = TypeVar("T")
R = TypeVar("R")
Load = Callable[[int, Bytes], None]  # fills a block with the bytes of a file from an offset on


def ahead(make: Callable[[T], R], items: Iterable[T], pool: ThreadPoolExecutor) -> Generator[R]:
    """Yield what is made of each item in turn, on a thread of a pool and while the one before is used."""
    rest = iter(items)
    making = [pool.submit(make, item) for item in islice(rest, 1)]
    while making:
        made = making.pop().result()
        making += [pool.submit(make, item) for item in islice(rest, 1)]
        yield made


def double_buffered(
    load: Load, size_bytes: int, block_bytes: int, progress: Callable[[int], None] = lambda num_bytes: None
) -> Generator[Columns]:
    """Yield the blocks of a file as rows of (address, bytes); `load` fills them in their order.

    The memory of a block is used again two blocks later. `progress` is called with a block's bytes once it was used.
    """
    arena = np.frombuffer(mmap.mmap(-1, 2 * max(min(block_bytes, size_bytes), 1)), np.uint8)
    buffers = np.split(arena, 2)

    def loaded(start: int) -> Bytes:
        block: Bytes = buffers[start // block_bytes % 2][: size_bytes - start]
        load(start, block)
        return block

    with ThreadPoolExecutor(1) as pool:
        for block in ahead(loaded, range(0, size_bytes, block_bytes), pool):
            yield np.array([(block.ctypes.data, len(block))], np.uint64)
            progress(len(block))
