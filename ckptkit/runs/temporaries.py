"""Temporaries: hidden files and empty folders that killed writers left in steps on a local disk; no listing shows them.

A file is one only if its name says that it was to become a file of the checkpoint format. Links are not followed.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from ckptkit.format.keys import is_attempt, is_of_step, step_folder
from ckptkit.loading.roots import steps_of
from threefold.claim import take_lock
from threefold.storage import Storage, written_name
from threefold.storage.folders import Folder, local_root
from threefold.storage.local import local_failures


@dataclass(frozen=True, slots=True)
class Temporary:
    """One hidden file: its own key and, relative to its step's folder, the one that it was to have."""

    hidden_key: str
    key: str
    size_bytes: int
    modified_s: float


@dataclass(frozen=True, slots=True)
class EmptyFolder:
    """The folder of an attempt, or of a step, in which nothing is; its key ends in "/"."""

    key: str
    modified_s: float


def steps_on_disk(storage: Storage) -> list[int]:
    """Return the steps that have a folder on a local disk, be there but hidden files in it, ascending.

    None elsewhere.
    """
    root = local_root(storage)
    return [] if root is None else steps_of(entry.name for entry in _folders(root))


def temporaries(storage: Storage, step: int) -> list[Temporary]:
    """Return the hidden files of a step; none where the storage is not a local disk, or the step's folder is a link."""
    return [
        Temporary(f"{folder}{entry.name}", key, status.st_size, status.st_mtime)
        for path, folder in _places(storage, step)
        for entry in _entries(path)
        if (key := _written_key(folder.partition("/")[2], entry.name)) and (status := _status(entry))
    ]


def remove_unless_written(storage: Storage, temporary: Temporary) -> None:
    """Remove a hidden file, unless a process that lives, on any machine whose locks are seen here, has it open.

    It is locked until it is gone: whoever has just made it waits for that, and makes another.
    """
    root, (inner, _, name) = local_root(storage), temporary.hidden_key.rpartition("/")
    assert root is not None, "found on a local disk"
    with local_failures("delete", root / temporary.hidden_key), Folder(root, inner) as folder:
        descriptor = folder.open(name, os.O_RDONLY)
        try:
            if _lock(descriptor):
                folder.unlink(name)
        finally:
            os.close(descriptor)


def empty_folders(storage: Storage, step: int) -> list[EmptyFolder]:
    """Return the empty folders of attempts of a step, or the step's own."""
    return [
        EmptyFolder(folder, status.st_mtime)
        for path, folder in _places(storage, step)
        if not _entries(path) and (status := _status(path))
    ]


def remove_folder(storage: Storage, empty: EmptyFolder) -> None:
    """Remove a folder if it is empty still, and the step's folder with its last attempt."""
    root, inner = local_root(storage), empty.key.rstrip("/")
    assert root is not None, "found on a local disk"
    while inner:
        inner, _, name = inner.rpartition("/")
        try:
            with Folder(root, inner) as folder:
                folder.remove_folder(name)
        except OSError:  # not empty, or removed by another
            return


def _places(storage: Storage, step: int) -> list[tuple[Path, str]]:
    """Return the folder of a step on a local disk and those of its attempts, with their keys.

    None where it is a link.
    """
    folder = storage.local_path(step_folder(step))
    if folder is None or folder.is_symlink():
        return []
    attempts = [attempt for attempt in _folders(folder) if is_attempt(attempt.name)]
    return [
        (folder, f"{folder.name}/"),
        *((Path(attempt.path), f"{folder.name}/{attempt.name}/") for attempt in attempts),
    ]


def _written_key(prefix: str, name: str) -> str | None:
    """Return the key of the format that a hidden file was to have, None for any other file."""
    written = written_name(name)
    key = f"{prefix}{written}"
    return key if written and is_of_step(key) else None


def _lock(descriptor: int) -> bool:
    """Lock a file against whoever would write it; return whether nobody does. Where there are no locks, nobody does."""
    try:
        return take_lock(descriptor, is_shared=True)
    except OSError:
        return True


def _status(path: Path | os.DirEntry[str]) -> os.stat_result | None:
    """Return the times and sizes of a file or folder; None where it is gone."""
    try:
        return os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _folders(folder: Path) -> list[os.DirEntry[str]]:
    return [entry for entry in _entries(folder) if entry.is_dir(follow_symlinks=False)]


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with local_failures("list", folder):
        try:
            with os.scandir(folder) as found:
                return list(found)
        except (FileNotFoundError, NotADirectoryError):
            return []
