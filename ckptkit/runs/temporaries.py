"""Temporaries: hidden files that killed writers left in the folders of steps on a local disk, which no listing shows.

A file is one only if its name says that it was to become a file of the checkpoint format.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ckptkit.format.root import DAMAGED_ROOT_KEY, PIN_KEY, ROOT_KEY, attempt_of, parse_step_folder, step_folder
from threefold.storage import Storage, written_name
from threefold.storage.local import local_failure


@dataclass(frozen=True, slots=True)
class Temporary:
    """One hidden file and, relative to its step's folder, the key that it was to have."""

    path: Path
    key: str
    size_bytes: int
    modified_s: float

    def remove(self) -> None:
        """Delete it, and its folder and the step's where nothing else is in them; it may be gone already."""
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            raise local_failure(error, "delete", self.path) from error
        with suppress(OSError):  # not empty, or removed by another
            self.path.parent.rmdir()
            if "/" in self.key:
                self.path.parent.parent.rmdir()


def steps_on_disk(storage: Storage) -> list[int]:
    """The steps that have a folder on a local disk, be there but hidden files in it, ascending; none elsewhere."""
    inside = storage.local_path("any")
    found = [] if inside is None else [parse_step_folder(entry.name) for entry in _folders(inside.parent)]
    return sorted(step for step in found if step is not None)


def temporaries(storage: Storage, step: int) -> list[Temporary]:
    """Those of a step; none where the storage is not a local disk."""
    folder = storage.local_path(step_folder(step))
    if folder is None:
        return []
    found = [*_files(folder, "")]
    for attempt in _folders(folder):
        found += _files(Path(attempt.path), f"{attempt.name}/")
    return found


def _files(folder: Path, prefix: str) -> Iterator[Temporary]:
    for entry in _entries(folder):
        name = written_name(entry.name)
        key = f"{prefix}{name}"
        if name and (key in (ROOT_KEY, DAMAGED_ROOT_KEY, PIN_KEY) or attempt_of(key)):
            with suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                yield Temporary(Path(entry.path), key, status.st_size, status.st_mtime)


def _folders(folder: Path) -> list[os.DirEntry[str]]:
    return [entry for entry in _entries(folder) if entry.is_dir(follow_symlinks=False)]


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise local_failure(error, "list", folder) from error
