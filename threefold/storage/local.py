"""Files of a local or parallel file system: durable by fsync of the file and its folder, exclusive by link(2).

A write goes to a hidden temporary name in the target's folder, which is never listed, and appears whole under its key.
"""

import contextlib
import errno
import filecmp
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from threefold.errors import StorageError
from threefold.storage import AlreadyExists, Buffer, ObjectInfo, buffers_of, check_key, is_temporary, temporary_name

COPY_BYTES = 16 << 20
MAX_RACES = 5  # with deletions that leave a folder empty
NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)  # what link(2) says on FAT and on some network mounts


class LocalStorage:
    """Keys are paths below one folder, which is made by the first write."""

    supports_if_absent = True

    def __init__(self, folder: str | Path) -> None:
        # a ".." leaves a missing folder or a link by another way once that is made: no place may change its meaning
        self.folder = Path(os.path.realpath(folder)) if ".." in Path(folder).parts else Path(folder).absolute()
        self.url = str(self.folder)

    def write(
        self, key: str, data: Buffer | Iterable[Buffer], *, if_absent: bool = False, size_bytes: int | None = None
    ) -> None:
        target = self._path(key)
        temporary = target.with_name(temporary_name(target.name))
        try:
            try:
                file = temporary.open("xb")
            except FileNotFoundError:
                make_folders(target.parent)
                file = temporary.open("xb")
            try:
                _fill(file, buffers_of(data))
                if if_absent:
                    _link(temporary, target)
                else:
                    temporary.replace(target)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            if if_absent:
                temporary.unlink(missing_ok=True)
            sync_folder(target.parent)
        except OSError as error:
            raise local_failure(error, "write", target) from error

    def read(self, key: str) -> bytes:
        path = self._path(key)
        try:
            return path.read_bytes()
        except OSError as error:
            raise local_failure(error, "read", path) from error

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        path = self._path(key)
        try:
            with path.open("rb", buffering=0) as file:
                return [_read_range(file.fileno(), path, start, stop) for start, stop in ranges]
        except OSError as error:
            raise local_failure(error, "read", path) from error

    def info(self, key: str) -> ObjectInfo | None:
        path = self._path(key)
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise local_failure(error, "look up", path) from error
        return ObjectInfo(key, status.st_size, status.st_mtime) if stat.S_ISREG(status.st_mode) else None

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for key, entry in self._walk(prefix[: prefix.rfind("/") + 1], prefix):
            try:
                status = entry.stat()
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ELOOP):  # deleted since the folder was read, or a link to itself
                    continue
                raise local_failure(error, "look up", entry.path) from error
            yield ObjectInfo(key, status.st_size, status.st_mtime)

    def list_keys(self, prefix: str = "") -> Iterator[str]:
        return (key for key, _ in self._walk(prefix[: prefix.rfind("/") + 1], prefix))

    def list_folders(self, prefix: str = "") -> Iterator[str]:
        folder = f"{prefix.rstrip('/')}/" if prefix else ""
        for entry in _entries(self.folder / folder):
            if _is_folder(entry) and self._holds_any(f"{folder}{entry.name}/"):
                yield entry.name

    def delete(self, keys: Iterable[str]) -> None:
        folders: set[Path] = set()
        for key in keys:
            path = self._path(key)
            try:
                path.unlink()
                folders.add(path.parent)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise local_failure(error, "delete", path) from error
        for folder in folders:
            try:
                self._remove_empty(folder)
            except OSError as error:
                raise local_failure(error, "delete files in", folder) from error

    def copy(self, source: str, target: str) -> None:
        path = self._path(source)
        try:
            with path.open("rb") as file:
                self.write(target, iter(lambda: file.read(COPY_BYTES), b""))
        except OSError as error:
            raise local_failure(error, "read", path) from error

    def local_path(self, key: str) -> Path | None:
        return self._path(key)

    def _path(self, key: str) -> Path:
        return self.folder / check_key(key)

    def _walk(self, folder: str, prefix: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Key and entry of each file below a folder whose key starts with prefix; only folders are read, no file.

        Links to folders are followed, but for those that lead back.
        """
        for entry in _entries(self.folder / folder):
            key = folder + entry.name
            if not _is_folder(entry):
                if key.startswith(prefix):
                    yield key, entry
            elif entry.is_symlink() and self._leads_back(entry, Path(folder)):
                continue
            elif f"{key}/".startswith(prefix) or prefix.startswith(f"{key}/"):
                yield from self._walk(f"{key}/", prefix)

    def _leads_back(self, link: os.DirEntry[str], folder: Path) -> bool:
        """Whether a link in a folder leads to one on the way to that folder, or to one above."""
        target = os.path.realpath(link.path)
        return any((self.folder / each).resolve().is_relative_to(target) for each in (folder, *folder.parents))

    def _holds_any(self, folder: str) -> bool:
        """Whether a folder holds a file, or somebody else's that may not be read, as the `lost+found` of a disk."""
        try:
            return any(self._walk(folder, ""))
        except StorageError as error:
            if isinstance(error.__cause__, PermissionError):
                return True
            raise

    def _remove_empty(self, folder: Path) -> None:
        """Make deletions in a folder durable, then remove it and its parents as far as they are empty."""
        with contextlib.suppress(FileNotFoundError):
            sync_folder(folder)
        while folder != self.folder and folder.is_relative_to(self.folder):
            try:
                folder.rmdir()
            except OSError:  # not empty, or another process removed it first
                return
            folder = folder.parent


def make_folders(folder: Path) -> None:
    """Create a folder and its missing parents, durably, though others may remove empty ones meanwhile."""
    for tries_left in reversed(range(MAX_RACES)):
        try:
            _make_missing(folder)
            return
        except FileNotFoundError:
            if not tries_left:
                raise


def _make_missing(folder: Path) -> None:
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for new in reversed(missing):
        try:
            new.mkdir(exist_ok=True)
        except FileExistsError:
            raise NotADirectoryError(errno.ENOTDIR, f"{new} is not a folder") from None
        sync_folder(new.parent)


def sync_folder(folder: Path) -> None:
    """Make the entries of a folder durable: names that were added, replaced or removed."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def local_failure(error: OSError, doing: str, path: str | Path) -> StorageError:
    """A system error of a local file as a StorageError with a hint that fits its cause."""
    if isinstance(error, FileNotFoundError) and doing == "read":
        return StorageError(f"{path} does not exist")
    # a failed save removes the folders that it made: a hint names what stays
    places = [Path(path).absolute(), *Path(path).absolute().parents][doing in ("write", "delete") :]
    there = next((each for each in places if os.path.exists(each)), Path("/"))
    disk = next(each for each in (there, *there.parents) if os.path.ismount(each))
    hint = {
        errno.ENOSPC: f"free some space or choose another place; df -h {disk}",
        errno.EDQUOT: "the quota is used up; free some space or choose another place",
        errno.EACCES: f"check the permissions: ls -ld {there}",
        errno.EPERM: f"check the permissions: ls -ld {there}",
        errno.EROFS: "the file system is mounted read-only; choose another place",
        errno.EMFILE: "raise the number of files that may be open: ulimit -n 65536",
    }.get(error.errno or 0)
    if hint is None and doing == "write":
        hint = "choose another place"
    return StorageError(f"cannot {doing} {path}: {error.strerror or error}", hint=hint)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """The entries of a folder in the order of their keys, a folder's key ending in "/"."""
    try:
        with os.scandir(folder) as found:
            entries = [entry for entry in found if not is_temporary(entry.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise local_failure(error, "list", folder) from error
    return sorted(entries, key=lambda entry: f"{entry.name}/" if _is_folder(entry) else entry.name)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a folder or a link to one; a link that leads nowhere, or where nobody may look, is not."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _fill(file: BinaryIO, buffers: Iterable[Buffer]) -> None:
    with file:
        for buffer in buffers:
            file.write(buffer)
        file.flush()
        os.fsync(file.fileno())


def _link(temporary: Path, target: Path) -> None:
    try:
        os.link(temporary, target)
    except FileExistsError:
        if not filecmp.cmp(temporary, target, shallow=False):
            raise AlreadyExists(f"{target} exists already: another writer won") from None
    except OSError as error:
        if error.errno not in NO_HARD_LINKS:
            raise
        text = f"cannot write {target} once and only once: its file system has no hard links ({error.strerror})"
        raise StorageError(text, hint="choose a place on another file system") from error


def _read_range(descriptor: int, path: Path, start: int, stop: int) -> bytes:
    parts: list[bytes] = []
    position = start
    while position < stop:
        part = os.pread(descriptor, stop - position, position)
        if not part:
            raise StorageError(f"{path} ends at byte {position}, wanted were bytes {start} to {stop}")
        parts.append(part)
        position += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
