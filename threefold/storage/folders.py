"""Folder: an open folder below a storage's own, reached component by component; no link is followed on the way.

The storage's own folder may be a link, or be reached through links: users link runs to other disks. A link below it may
lead to the files of somebody else, so whoever writes or deletes holds a Folder and looks names up in that alone.
Reading follows links.

A name is visible before it is durable, and its maker may be killed in between. So nobody relies on a folder or file
that is there already before the folders that name it were synced.
"""

import contextlib
import errno
import itertools
import os
import stat
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from threefold.closing import Closing
from threefold.errors import StorageError, quoted
from threefold.storage.contract import Storage

MAX_RACES = 5  # with deletions that leave a folder empty
_MAX_REMEMBERED = 1024  # folders whose way is durable
_WAY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC  # costs a file system no more than the same component of a path
T = TypeVar("T")


class Folder(Closing):
    """The folder `inner` (a key, "" for the root itself) below `root`; close it, or use it in a `with`.

    With `make` it is created if it is missing, and is durable even if another process made it. StorageError if a
    component of `inner` is a link.
    """

    def __init__(self, root: Path, inner: str = "", *, make: bool = False) -> None:
        self.path = root / inner
        parts = Path(inner).parts
        self._descriptor = surviving_races(lambda: _open(root, parts, make=True)) if make else _open(root, parts)

    def open(self, name: str, flags: int) -> int:
        """Open a file in the folder that is not a link; return its descriptor."""
        try:
            return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=self._descriptor)
        except OSError as error:
            if error.errno == errno.ELOOP:
                self.refuse_link(name)
            raise

    def refuse_link(self, name: str) -> None:
        """Raise StorageError if a name in the folder is a link."""
        if _is_link(name, self._descriptor):
            raise _link_in_the_way(self.path / name)

    def require(self, name: str) -> None:
        """Raise FileNotFoundError if nothing in the folder has a name."""
        os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)

    def link(self, source: str, target: str) -> None:
        """Give a file in the folder a second name; FileExistsError if it is taken, be it by a link."""
        os.link(source, target, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor, follow_symlinks=False)

    def replace(self, source: str, target: str) -> None:
        """Rename a file in the folder, in place of one that has the name."""
        os.replace(source, target, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)

    def unlink(self, name: str) -> None:
        """Remove a file, or a link and not what it leads to."""
        os.unlink(name, dir_fd=self._descriptor)

    def remove_folder(self, name: str) -> None:
        """Remove an empty folder in this one."""
        os.rmdir(name, dir_fd=self._descriptor)

    def sync(self) -> None:
        """Make the folder's entries durable: names that were added, replaced or removed."""
        sync_folder(".", inside=self._descriptor)

    def close(self) -> None:
        """Close it; a second time does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def local_root(storage: Storage) -> Path | None:
    """Return the folder that a storage's keys are below, None if it is not a local one."""
    path = storage.local_path("any")
    return None if path is None else path.parent


def linked_folder(storage: Storage, folder: str) -> str | None:
    """Return the first link on the way to a folder of a local disk, itself included; None if there is none."""
    root = local_root(storage)
    if root is None:
        return None
    ways = itertools.accumulate(Path(folder).parts, lambda way, part: f"{way}/{part}")
    return next((way for way in ways if (root / way).is_symlink()), None)


def links_or_keys(storage: Storage, keys: Sequence[str]) -> list[str]:
    """Return keys, and in the place of all that are behind one link that link, for whoever deletes them."""
    behind = {folder: linked_folder(storage, folder) for folder in {key.rpartition("/")[0] for key in keys}}
    return list(dict.fromkeys(behind[key.rpartition("/")[0]] or key for key in keys))


def make_folders(folder: Path) -> None:
    """Create a folder and its missing parents, though others may remove empty ones; all are durable."""
    surviving_races(lambda: _make_missing(folder))
    sync_way(folder)


def sync_way(folder: Path) -> None:
    """Make durable that a folder is there, which another process may have made a moment ago.

    The names above it are synced, as far as its file system reaches; once for a folder that stays.
    """
    status = os.stat(folder)
    _sync_above(os.path.realpath(folder), status.st_dev, status.st_ino)


def sync_folder(folder: Path | str, *, inside: int | None = None) -> None:
    """Make the entries of a folder durable: names that were added, replaced or removed.

    `inside` is the descriptor of one that the path begins at; it may be open as a place alone.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=inside)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def surviving_races(work: Callable[[], T]) -> T:
    """Do some work that makes folders, though others may remove them while they are empty."""
    for _ in range(MAX_RACES - 1):
        with contextlib.suppress(FileNotFoundError):
            return work()
    return work()


@lru_cache(_MAX_REMEMBERED)
def _sync_above(folder: str, device: int, inode: int) -> None:
    """Sync the parents of one folder; another one that later has its path has another inode."""
    parent = os.path.dirname(folder)
    status = os.stat(parent)
    if parent == folder or status.st_dev != device:
        return
    with contextlib.suppress(PermissionError):  # of somebody else, so nothing in it was just made
        sync_folder(parent)
    _sync_above(parent, status.st_dev, status.st_ino)


def _open(root: Path, parts: tuple[str, ...], *, make: bool = False) -> int:
    descriptor, at = _open_root(root, make=make), root
    try:
        for part in parts:
            at /= part
            try:
                inner = _step_into(descriptor, part, at)
            except FileNotFoundError:
                if not make:
                    raise
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=descriptor)
                inner = _step_into(descriptor, part, at)
            outer, descriptor = descriptor, inner
            try:
                if make:
                    sync_folder(".", inside=outer)
            finally:
                os.close(outer)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _open_root(root: Path, *, make: bool) -> int:
    if make:
        make_folders(root)
    return os.open(root, _WAY)


def _step_into(descriptor: int, part: str, path: Path) -> int:
    try:
        return os.open(part, _WAY | os.O_NOFOLLOW, dir_fd=descriptor)
    except NotADirectoryError as error:
        if _is_link(part, descriptor):
            raise _link_in_the_way(path) from None
        raise NotADirectoryError(errno.ENOTDIR, f"{path} is not a folder") from error


def _link_in_the_way(link: Path) -> StorageError:
    return StorageError(
        f"{link} is a link, and nothing is written or deleted through links",
        hint=f"ls -l {quoted(link)} shows where it leads: name that place, or take the link away",
    )


def _is_link(name: str, descriptor: int) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


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
