"""Folders: the files below local folders and those that globs match; each real folder once, whatever links lead to it.

Links to folders are followed after all real folders were, so that a folder has the name that takes no link if there is
one. A folder that cannot be listed is an error, or is put with the faults of others: its files would be missing in
silence.
"""

import glob
import os
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

from threefold.errors import StorageError, UserError, quoted

Faults = list[UserError]


def plain_path(path: str) -> str:
    """Return a path without "." and empty parts, and without a ".." except behind a link, where it leads elsewhere."""
    root = "/" if path.startswith("/") else ""
    parts: list[str] = []
    for part in path.split("/"):
        if part == ".." and parts and parts[-1] != ".." and not os.path.islink(root + "/".join(parts)):
            parts.pop()
        elif part not in ("", ".") and not (part == ".." and root and not parts):
            parts.append(part)
    return root + "/".join(parts) or "."


def entries_below(
    folders: Iterable[str], but: Iterable[str] = (), faults: Faults | None = None
) -> Iterator[os.DirEntry[str]]:
    """Return all entries below folders that are not folders to go into: files, and whatever has a hidden name.

    The files and folders of `but` are left out, by whatever way they are reached. `faults` takes those that cannot be
    listed.
    """
    left_out = {_identity(os.stat(path)) for path in but if os.path.exists(path)}
    inodes = {inode for _, inode in left_out}
    for _, entries in _walk(folders, left_out, faults):
        for entry in entries:
            is_known = entry.inode() in inodes and _identity(os.stat(entry.path)) in left_out
            if not is_known and (is_hidden(entry.name) or not _is_folder(entry)):
                yield entry


def matches_of(pattern: str, faults: Faults | None = None) -> list[str]:
    """Return what a glob matches: "*" stays within a folder, "**" alone between slashes does not.

    `faults` takes the folders that cannot be listed.
    """
    root = "/" if pattern.startswith("/") else "."
    matches = set(_matches(root, [part for part in pattern.split("/") if part not in ("", ".")], faults))
    return sorted(path for path in matches if not pattern.endswith("/") or os.path.isdir(path))


def is_hidden(name: str) -> bool:
    """Return whether a name, or a part of a path, begins with a point."""
    return name.startswith(".") or "/." in name


def is_through_link(path: str) -> bool:
    """Return whether a link is on the way of a path, or is the path itself."""
    return os.path.realpath(path) != os.path.abspath(path)


def _walk(
    folders: Iterable[str], left_out: Iterable[tuple[int, int]] = (), faults: Faults | None = None
) -> Iterator[tuple[str, list[os.DirEntry[str]]]]:
    """Return folders and all that is below them, hidden ones left out, each real folder once, with its entries."""
    seen = set(left_out)
    waiting = sorted(folders, key=lambda folder: (is_through_link(folder), folder))
    while waiting:
        links: list[str] = []
        stack = waiting[::-1]
        while stack:
            folder = stack.pop()
            entries, identity = _entries(folder, faults)
            if identity in seen:
                continue
            seen.add(identity)
            yield folder, entries
            below = [entry for entry in entries if not is_hidden(entry.name) and _is_folder(entry)]
            links += [_path(folder, entry.name) for entry in below if entry.is_symlink()]
            stack += [_path(folder, entry.name) for entry in reversed(below) if not entry.is_symlink()]
        waiting = sorted(links)


def _matches(folder: str, parts: list[str], faults: Faults | None) -> Iterator[str]:
    if not parts:
        yield folder
        return
    part, rest = parts[0], parts[1:]
    if part == "**":
        for below, _ in _walk([folder] if os.path.isdir(folder) else [], (), faults):
            yield from _matches(below, rest, faults)
    elif not glob.has_magic(part):
        if os.path.lexists(path := _path(folder, part)):
            yield from _matches(path, rest, faults)
    elif os.path.isdir(folder):
        for entry in _entries(folder, faults)[0]:
            if fnmatchcase(entry.name, part) and (part.startswith(".") or not is_hidden(entry.name)):
                yield from _matches(_path(folder, entry.name), rest, faults)


def _path(folder: str, name: str) -> str:
    return name if folder == "." else os.path.join(folder, name)


def _entries(folder: str, faults: Faults | None) -> tuple[list[os.DirEntry[str]], tuple[int, int]]:
    """Return the sorted entries of a folder, and the device and inode that no other folder has.

    One that cannot be listed has no entries, and -1 and its number among the faults.
    """
    try:
        with os.scandir(folder) as scanned:
            return sorted(scanned, key=lambda entry: entry.name), _identity(os.stat(folder))
    except OSError as error:
        fault = StorageError(f"cannot read {folder}: {error.strerror}", hint=f"ls -ld {quoted(folder)}")
        if faults is None:
            raise fault from error
        faults.append(fault)
        return [], (-1, len(faults))


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder or a link to one; a link that leads nowhere or to itself is not."""
    try:
        return entry.is_dir()
    except OSError:
        return False
