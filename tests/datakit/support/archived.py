"""What the tests of archives share: a store of several shards, archives of many small frames, faulty storage."""

from pathlib import Path

import numpy as np
import pytest

from datakit import TokenStore, write_store
from datakit.store.archiving import archive
from threefold.errors import StorageError
from threefold.storage import Storage, open_storage
from threefold.storage.fault import Fault, FaultStorage

FRAME_BYTES = 512


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""


def make_store(path: Path) -> TokenStore:
    """A store of three shards and a few frames each, with empty documents."""
    rng = np.random.default_rng(7)
    documents = [rng.integers(0, 300, size) for size in (0, 1, 700, 256, 0, 3000, 5)]
    return write_store(path, documents, vocab_size=300, shard_documents=3)


def make_archive(store: Path, place: str) -> None:
    """An archive of many small frames."""
    archive(store, place, frame_bytes=FRAME_BYTES)


def failing(url: str, operation: str, *, after: int = 0, error: type[BaseException] = StorageError) -> Storage:
    """The storage behind a URL, of which one operation fails once it was served so often."""
    return FaultStorage(open_storage(url), Fault(error(f"no {operation} for the test"), (operation,), after=after))


def kill_after(num_writes: int, patch: pytest.MonkeyPatch) -> None:
    """Let the write after this many end the run as a kill does."""

    def opened(url: str, **_: object) -> Storage:
        return failing(url, "write", after=num_writes, error=Killed)

    patch.setattr("datakit.format.output.open_repeating", opened)
