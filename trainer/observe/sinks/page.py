"""Page: memory that a trainer and the process of a sink share: how many lines were taken or lost, and what was said.

One process writes and the other reads, whatever either waits for.
"""

import mmap
import os
import struct

HEADER = struct.Struct("<QQII")  # lines taken, lines lost, number of the text, its bytes
SIZE_BYTES = 4096


class Page:
    """A page behind a file descriptor."""

    def __init__(self, fd: int) -> None:
        self.fd, self._memory = fd, mmap.mmap(fd, SIZE_BYTES)

    @classmethod
    def new(cls) -> "Page":
        """Return a page of memory of its own."""
        fd = os.memfd_create("sink", os.MFD_CLOEXEC)
        os.ftruncate(fd, SIZE_BYTES)
        return cls(fd)

    def count(self, *, read: int = 0, lost: int = 0) -> None:
        """Count lines."""
        before, gone, *_ = HEADER.unpack_from(self._memory)
        struct.pack_into("<QQ", self._memory, 0, before + read, gone + lost)

    def say(self, text: str) -> None:
        """Put a text in place of the one before it."""
        data = text.encode(errors="replace")[: SIZE_BYTES - HEADER.size]
        *_, number, _ = HEADER.unpack_from(self._memory)
        self._memory[HEADER.size : HEADER.size + len(data)] = data
        struct.pack_into("<II", self._memory, 16, number + 1, len(data))

    @property
    def counts(self) -> tuple[int, int]:
        """Return how many lines were taken, and how many of those the sink lost."""
        taken, lost, *_ = HEADER.unpack_from(self._memory)
        return taken, lost

    @property
    def text(self) -> tuple[int, str]:
        """Return how many texts there were, and the last one."""
        *_, number, size = HEADER.unpack_from(self._memory)
        return number, self._memory[HEADER.size : HEADER.size + size].decode(errors="replace")

    def close(self) -> None:
        """Let go of the page."""
        self._memory.close()
        os.close(self.fd)
