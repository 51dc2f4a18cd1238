"""Folder: an open folder below a storage's own, reached component by component; no link is followed on the way.

The storage's own folder may be a link, or be reached through links: users link runs to other disks. A link below it may
lead to the files of somebody else, so whoever writes or deletes holds a Folder and looks names up in that alone.
Reading follows links.

A name is visible before it is durable, and its maker may be killed in between. So nobody relies on a folder or file
that is there already before the folders that name it were synced. That a folder names another is synced once a process.
It is remembered by the handles of both, which no folder that is made later has: inodes are used again at once.
"""

import contextlib
import errno
import itertools
import os
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from threefold.closing import Closing
from threefold.errors import StorageError, quoted
from threefold.storage.contract import Storage

if TYPE_CHECKING:
    import ctypes

MAX_RACES = 5  # with deletions that leave a folder empty
_MAX_REMEMBERED = 4096  # names of folders that are durable; then they are synced again
_AT_EMPTY_PATH, _HEAD, _MAX_HANDLE_BYTES = 0x1000, struct.Struct("Ii"), 128  # of <fcntl.h>: a handle's size and kind
_WAY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC  # costs a file system no more than the same component of a path
Handle = tuple[int, int, bytes]  # mount, kind, and the inode with its generation
T = TypeVar("T")
_durable = set[tuple[Handle | None, ...]]()  # pairs of folders of which it is durable that the first names the second


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


def is_local(storage: Storage) -> bool:
    """Return whether a storage's keys are files of this machine."""
    return local_root(storage) is not None


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


def sync_way(folder: Path, below: Path | None = None) -> None:
    """Make durable that a folder is there, which another process may have made a moment ago.

    The folders that name it are synced, as far as its file system reaches; once for a folder that stays. So are those
    of the links on its path `below` a folder of that path.
    """
    with opened(folder) as inner:
        _sync_above(inner)
        if below is None or folder == below:
            return
        with opened(folder.parent) as outer:
            _sync_once(outer, inner, _sync_entries)
    sync_way(folder.parent, below)


def sync_folder(folder: Path | str, *, inside: int | None = None) -> None:
    """Make the entries of a folder durable: names that were added, replaced or removed.

    `inside` is the descriptor of one that the path begins at; it may be open as a place alone.
    """
    with opened(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, inside) as descriptor:
        os.fsync(descriptor)


def surviving_races(work: Callable[[], T]) -> T:
    """Do some work that makes folders, though others may remove them while they are empty."""
    for _ in range(MAX_RACES - 1):
        with contextlib.suppress(FileNotFoundError):
            return work()
    return work()


def _sync_above(inner: int) -> None:
    """Sync the folders above an open one, each of which names the one below."""
    with opened("..", inside=inner) as outer:
        ours, above = os.fstat(inner), os.fstat(outer)
        if ours.st_dev == above.st_dev and not os.path.samestat(ours, above):
            _sync_once(outer, inner, _sync_up)


def _sync_up(folder: int) -> None:
    with contextlib.suppress(PermissionError):  # of somebody else, so nothing in it was just made
        _sync_entries(folder)
    _sync_above(folder)


def _sync_entries(folder: int) -> None:
    sync_folder(".", inside=folder)


def _sync_once(outer: int, inner: int, sync: Callable[[int], None]) -> None:
    """Sync an open folder that names another, unless that was done for this very pair.

    Where a file system has no handles it is done each time. Whoever renames a folder syncs that himself.
    """
    names = _handle(outer), _handle(inner)
    if names in _durable:
        return
    sync(outer)
    if None not in names:
        if len(_durable) >= _MAX_REMEMBERED:
            _durable.clear()
        _durable.add(names)


@contextlib.contextmanager
def opened(path: Path | str, flags: int = _WAY, inside: int | None = None) -> Iterator[int]:
    """Open a file or a folder for the length of a `with`, by default as a place alone; yield its descriptor."""
    descriptor = os.open(path, flags, dir_fd=inside)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _handle(folder: int) -> Handle | None:
    """Return what the file system knows an open folder by, None if it has nothing of the kind."""
    import ctypes  # takes 5 ms

    library = _library()
    if not hasattr(library, "name_to_handle_at"):
        return None
    handle, mount = ctypes.create_string_buffer(_HEAD.size + _MAX_HANDLE_BYTES), ctypes.c_int()
    _HEAD.pack_into(handle, 0, _MAX_HANDLE_BYTES, 0)
    if library.name_to_handle_at(folder, b"", handle, ctypes.byref(mount), _AT_EMPTY_PATH):
        return None
    size, kind = _HEAD.unpack_from(handle)
    return mount.value, kind, handle.raw[_HEAD.size : _HEAD.size + size]


@lru_cache
def _library() -> "ctypes.CDLL":
    import ctypes

    return ctypes.CDLL(None)


def _open(root: Path, parts: tuple[str, ...], *, make: bool = False) -> int:
    descriptor, at = _open_root(root, make=make), root
    try:
        if make:
            _sync_above(descriptor)
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
                    _sync_once(outer, inner, _sync_entries)
            finally:
                os.close(outer)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _open_root(root: Path, *, make: bool) -> int:
    try:
        return os.open(root, _WAY)
    except (FileNotFoundError, NotADirectoryError):
        if not make:
            raise
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
