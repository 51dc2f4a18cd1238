"""ShardFile: an open file whose ranges are read, not mapped: a shard's tokens, or what a cache keeps of them."""

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from weakref import finalize

from datakit.files.durable import reading
from datakit.shards.kept_open import Bound
from threefold.errors import CheckFailed, quoted

# of all stores of a process together; the rest of its open files is left to others
OPEN_FILES = Bound(max(8, min(512, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)))


class ShardFile:
    """An open descriptor, closed with the last reference; safe to read from several threads.

    If it is not kept, it is one reader's, which lets it go after it has read.
    """

    def __init__(
        self, path: Path | str, descriptor: int, *, is_kept: bool = True, closed: Callable[[], None] | None = None
    ) -> None:
        """Own a descriptor of the file that messages name as `path`; `closed` is called after it is closed."""
        self.path, self.descriptor, self.is_kept = path, descriptor, is_kept
        self.close = finalize(self, _close, descriptor, closed)
        self.close.atexit = False  # threads may read until the very end

    def let_go(self) -> None:
        """Close it after it was read, if it is not kept."""
        if not self.is_kept:
            self.close()

    @classmethod
    def open(cls, path: Path, size_bytes: int) -> "ShardFile":
        """Open a file; CheckFailed if it has not this size."""
        with reading(path):
            file = cls(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            found = os.fstat(file.descriptor).st_size
        if found != size_bytes:
            raise CheckFailed(
                f"{path} has {found} bytes, its manifest says {size_bytes}",
                hint=f"datakit verify {quoted(path.parent)}",
            )
        return file


def _close(descriptor: int, closed: Callable[[], None] | None) -> None:
    os.close(descriptor)
    if closed is not None:
        closed()


class FilePiece(NamedTuple):
    """Bytes [start, start + size) of an open file."""

    file: ShardFile
    start: int
    size: int
