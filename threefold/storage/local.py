"""Files of a local or parallel file system: durable by fsync of the file and its folder, exclusive by link(2).

A write goes to a hidden temporary name in the target's folder, which is never listed, and appears whole under its key.
Links are followed to read, and up to the storage's own folder; nothing below it is written or deleted through one.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from threefold.errors import StorageError
from threefold.storage.contract import (
    Buffer,
    CutShort,
    ObjectInfo,
    Storage,
    buffers_of,
    check_key,
    is_temporary,
)  # fmt: skip
from threefold.storage.file_systems import is_remote
from threefold.storage.folders import Folder, local_root, sync_folder, sync_way
from threefold.storage.new_file import NewFile

COPY_BYTES = 16 << 20
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class LocalStorage:
    """Keys are paths below one folder, which is made by the first write."""

    supports_if_absent = True

    def __init__(self, folder: str | Path) -> None:
        # a ".." leaves a missing folder or a link by another way once that is made: no place may change its meaning
        self.folder = Path(os.path.realpath(folder)) if ".." in Path(folder).parts else Path(folder).absolute()
        self.url = self.address = str(self.folder)

    def write(
        self, key: str, data: Buffer | Iterable[Buffer], *, if_absent: bool = False, size_bytes: int | None = None
    ) -> None:
        path = self._path(key)
        with local_failures("write", path), NewFile(self.folder, key) as file:
            file.fill(buffers_of(data))
            file.publish(if_absent=if_absent)

    def read(self, key: str) -> bytes:
        path = self._path(key)
        with local_failures("read", path):
            return path.read_bytes()

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        path = self._path(key)
        with local_failures("read", path), path.open("rb", buffering=0) as file:
            return [_read_range(file.fileno(), path, start, stop) for start, stop in ranges]

    def info(self, key: str) -> ObjectInfo | None:
        path = self._path(key)
        with local_failures("look up", path):
            try:
                status = path.stat()
            except (FileNotFoundError, NotADirectoryError):
                return None
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
        groups: dict[str, list[str]] = {}
        for key in keys:
            folder, _, name = check_key(key).rpartition("/")
            groups.setdefault(folder, []).append(name)
        for inner, names in groups.items():
            self._delete_in(inner, names)

    def copy(self, source: str, target: str) -> None:
        path = self._path(source)
        with local_failures("read", path), path.open("rb") as file:
            self.write(target, iter(lambda: file.read(COPY_BYTES), b""))

    def afresh(self) -> "LocalStorage | None":
        return _PastCache(self.folder) if is_remote(self.folder) else None

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
        """Return whether a link in a folder leads to one on the way to that folder, or to one above."""
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

    def _delete_in(self, inner: str, names: Sequence[str]) -> None:
        """Delete files in a folder durably, then remove it and its parents as far as they are empty."""
        at, num_deleted = self.folder / inner, 0
        try:
            with Folder(self.folder, inner) as folder:
                for name in names:
                    at = folder.path / name
                    with contextlib.suppress(FileNotFoundError):
                        folder.unlink(name)
                        num_deleted += 1
                at = folder.path
                if num_deleted:
                    folder.sync()
        except (FileNotFoundError, NotADirectoryError):  # there is nothing to delete
            return
        except OSError as error:
            raise local_failure(error, "delete", at) from error
        while inner and num_deleted:
            inner, _, name = inner.rpartition("/")
            try:
                with Folder(self.folder, inner) as parent:
                    parent.remove_folder(name)
            except OSError:  # not empty, or another process removed it first
                return


class _PastCache(LocalStorage):
    """The same files of a server, read from there and not from the page cache."""

    def read(self, key: str) -> bytes:
        self._drop(key)
        return super().read(key)

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        self._drop(key)
        return super().read_ranges(key, ranges)

    def _drop(self, key: str) -> None:
        path = self._path(key)
        with local_failures("read", path), path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def keep_file(storage: Storage, key: str) -> None:
    """Make durable what an earlier try left under a key of a local folder, and let go of the page cache's copy.

    What is read from then on is what the disk holds. Where that fails the file is removed: no later fsync of it could
    be believed. Does nothing for other storages, whose objects are durable once they are there.
    """
    root, (inner, _, name) = local_root(storage), key.rpartition("/")
    if root is None:
        return
    with local_failures("write", root / key), Folder(root, inner) as folder:
        descriptor = folder.open(name, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            sync_name(storage, key)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        except (OSError, StorageError):
            with contextlib.suppress(OSError):
                folder.unlink(name)
            raise
        finally:
            os.close(descriptor)


def sync_name(storage: Storage, key: str) -> None:
    """Make durable that a key of a local folder is there, which whoever put it may have failed to.

    So are all names beside it, and those of the folders on the way to it. Call it before what another process may have
    put is acknowledged or named. Its content was made durable before it got its name. Do nothing for other storages.
    """
    root, (inner, _, _) = local_root(storage), key.rpartition("/")
    if root is None:
        return
    with local_failures("write", root / key):
        sync_folder(root / inner)
        sync_way(root / inner, below=root)


@contextlib.contextmanager
def local_failures(doing: str, path: str | Path) -> Iterator[None]:
    """Raise a system error of a local file as what `local_failure` makes of it."""
    try:
        yield
    except OSError as error:
        raise local_failure(error, doing, path) from error


def local_failure(error: OSError, doing: str, path: str | Path) -> StorageError:
    """Return a system error of a local file as a StorageError with a hint that fits its cause."""
    if isinstance(error, FileNotFoundError) and doing == "read":
        return StorageError(f"{path} does not exist")
    # a failed save removes the folders that it made: a hint names what stays
    places = [Path(path).absolute(), *Path(path).absolute().parents][doing in ("write", "delete") :]
    hint = _hint_for(error, places)
    if hint is None and doing == "write":
        hint = "choose another place"
    return StorageError(f"cannot {doing} {path}: {error.strerror or error}", hint=hint)


def system_failure(error: OSError) -> StorageError:
    """Return a system error without words of its own as a StorageError, with a hint that fits its cause."""
    cause = error.strerror or str(error) or type(error).__name__
    if isinstance(error.filename, str):
        path = Path(error.filename).absolute()
        return StorageError(f"{error.filename}: {cause}", hint=_hint_for(error, [path, *path.parents]))
    finds_none = cause.startswith("No usable temporary directory")  # says tempfile, which tried to write to each
    if not finds_none and error.errno not in NO_ROOM:
        return StorageError(cause)
    full = [folder for folder in _temporary_folders() if _is_full(folder)]
    if full:
        return StorageError(
            f"the temporary folder is full: {full[0]}",
            hint=f"free some space in {full[0]}, or export TMPDIR=/a/folder/with/room",
        )
    if finds_none:
        return StorageError("no temporary folder can be written to", hint="export TMPDIR=/a/folder/with/room")
    return StorageError(cause, hint="free some space: df -h shows which disk is full")


def _hint_for(error: OSError, places: Sequence[Path]) -> str | None:
    """Return what to try after a system error in the first of some folders and files that is there."""
    existing = next((each for each in places if os.path.exists(each)), Path("/"))
    disk = next(each for each in (existing, *existing.parents) if os.path.ismount(each))
    return {
        errno.ENOSPC: f"free some space or choose another place; df -h {disk}",
        errno.EDQUOT: "the quota is used up; free some space or choose another place",
        errno.EACCES: f"check the permissions: ls -ld {existing}",
        errno.EPERM: f"check the permissions: ls -ld {existing}",
        errno.EROFS: "the file system is mounted read-only; choose another place",
        errno.EMFILE: "raise the number of files that may be open: ulimit -n 65536",
    }.get(error.errno or 0)


def _temporary_folders() -> list[str]:
    """Return the folders that Python's tempfile tries."""
    named = [os.environ.get(name, "") for name in ("TMPDIR", "TEMP", "TMP")]
    return [folder for folder in (*named, "/tmp", "/var/tmp", "/usr/tmp") if folder and os.path.isdir(folder)]


def _is_full(folder: str) -> bool:
    status = os.statvfs(folder)
    return not status.f_bavail or (status.f_files > 0 and not status.f_favail)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder in the order of their keys, a folder's key ending in "/"."""
    with local_failures("list", folder):
        try:
            with os.scandir(folder) as found:
                entries = [entry for entry in found if not is_temporary(entry.name)]
        except (FileNotFoundError, NotADirectoryError):
            return []
    return sorted(entries, key=lambda entry: f"{entry.name}/" if _is_folder(entry) else entry.name)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder or a link to one.

    A link that leads nowhere, or where nobody may look, is not.
    """
    try:
        return entry.is_dir()
    except OSError:
        return False


def _read_range(descriptor: int, path: Path, start: int, stop: int) -> bytes:
    parts: list[bytes] = []
    position = start
    while position < stop:
        part = os.pread(descriptor, stop - position, position)
        if not part:
            raise CutShort(f"{path} ends at byte {position}, wanted were bytes {start} to {stop}")
        parts.append(part)
        position += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
