"""FileBlocks: the bytes of a file that an export makes, in equal blocks, one loaded while another is written."""

import mmap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ckptkit.io.blocks import Bytes, Columns


class FileBlocks:
    """The blocks of one file of a size; a kind of file says how a block is loaded. Blocks are loaded in their order."""

    def __init__(self, size_bytes: int, block_bytes: int) -> None:
        self._size, self._block_bytes = size_bytes, block_bytes
        self._buffers = [np.frombuffer(mmap.mmap(-1, min(block_bytes, size_bytes)), np.uint8) for _ in range(2)]

    def load(self, start: int, block: Bytes) -> None:
        """Fill a block with the bytes of the file from `start` on."""
        raise NotImplementedError

    def blocks(self, progress: Callable[[int], None]) -> Iterator[Columns]:
        """Yield rows of (address, bytes); the memory of one is used again two blocks later."""
        with ThreadPoolExecutor(1) as ahead:
            loading = ahead.submit(self._loaded, 0)
            for start in range(0, self._size, self._block_bytes):
                block = loading.result()
                if start + self._block_bytes < self._size:
                    loading = ahead.submit(self._loaded, start + self._block_bytes)
                yield np.array([(block.ctypes.data, len(block))], np.uint64)
                progress(start + len(block))

    def _loaded(self, start: int) -> Bytes:
        block = self._buffers[start // self._block_bytes % 2][: self._size - start]
        self.load(start, block)
        return block
