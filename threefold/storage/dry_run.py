"""DryRunStorage: a storage that is read as ever and never changed; `changes` says what would have been."""

from collections.abc import Iterable

from threefold.errors import StorageError
from threefold.storage.contract import AlreadyExists, Buffer, Storage, buffers_of, check_key
from threefold.storage.wrapping import Request, WrappingStorage


class DryRunStorage(WrappingStorage):
    """Another storage, of which writes, deletions and copies are recorded in their order and not done.

    What was recorded is not read back. It names no local files, so that nothing is written past it.
    """

    hides_files = True

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self.changes: list[Request] = []

    def write(
        self, key: str, data: Buffer | Iterable[Buffer], *, if_absent: bool = False, size_bytes: int | None = None
    ) -> None:
        """Record a write and its bytes, those of an iterable one buffer at a time; AlreadyExists as the real one."""
        check_key(key)
        if if_absent and self.info(key) is not None:
            data = b"".join(buffers_of(data))
            if self.read(key) != data:
                raise AlreadyExists(f"{self.url}/{key} exists already: another writer won")
        self.changes.append(Request("write", (key,), sum(memoryview(buffer).nbytes for buffer in buffers_of(data))))

    def delete(self, keys: Iterable[str]) -> None:
        """Record a deletion."""
        self.changes.append(Request("delete", tuple(map(check_key, keys))))

    def copy(self, source: str, target: str) -> None:
        """Record a copy; StorageError if its source is missing."""
        found = self.info(source)
        if found is None:
            raise StorageError(f"{self.url}/{source} does not exist")
        self.changes.append(Request("copy", (source, check_key(target)), found.size_bytes))
