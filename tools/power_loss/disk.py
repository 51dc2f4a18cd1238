"""What recorded calls change on a disk, each change by itself, and from when on a loss of power cannot take it back.

A change is what a disk keeps or loses as one: an entry of a folder, a block of a file's data, a file's length. A rename
is one change of two entries, the new one last. Nothing is durable but by an fsync that began after the change's call
had returned, and that has ended: of the folder that holds the entry, the new one, or of the file for data and length.
"""

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from threefold.errors import StorageError
from tools.power_loss.calls import Call

BLOCK = 4096
ROOT = 0  # the number of the folder itself
Entry = tuple[int, str]  # a folder's number and a name in it
Tree = dict[str, bytes | None]  # what is below a folder by its path there: a file's bytes, None for a folder


@dataclass(frozen=True, slots=True)
class Change:
    """A change by a call that began and ended then; files and folders go by numbers."""

    began: int
    ended: int
    entries: tuple[tuple[Entry, int | None], ...] = ()
    file: int = -1
    offset: int = 0
    data: bytes = b""  # of one block
    length: int = -1  # the file's: at least this, or with `is_cut` just this
    is_cut: bool = False
    host: str = ""


@dataclass(frozen=True, slots=True)
class Sync:
    """An fsync of a file or a folder by its number; `name` is what that was called, `by` who called, if it is known."""

    began: int
    ended: int
    of: int
    name: str
    by: str = ""
    host: str = ""

    @property
    def use(self) -> str:
        """Return the name without what differs from run to run, or from part to part."""
        return re.sub(r"[0-9a-f]{16}|\d+", "#", self.name)


@dataclass(frozen=True)
class Recording:
    """The changes that a program made below a folder, in the order of its calls' ends, and what it promised when.

    `entries` and `contents` are of the time before, all of it durable. `promises` have the moment from which they hold,
    and the host that made them.
    """

    entries: Mapping[Entry, int]
    contents: Mapping[int, bytes]
    folders: frozenset[int]
    changes: tuple[Change, ...]
    syncs: tuple[Sync, ...]
    promises: tuple[tuple[int, str, str], ...]

    def without(self, use: str) -> "Recording":
        """Return the recording of a program that leaves out the fsyncs of one use, or of one caller."""
        return replace(self, syncs=tuple(sync for sync in self.syncs if use not in (sync.use, sync.by)))

    @cached_property
    def durable_at(self) -> tuple[float, ...]:
        """Return the moment from which each change is durable; inf if there is none."""
        syncs: dict[int, list[Sync]] = {}
        for sync in self.syncs:
            syncs.setdefault(sync.of, []).append(sync)

        def since(change: Change, of: int) -> float:
            return min((sync.ended for sync in syncs.get(of, ()) if sync.began > change.ended), default=math.inf)

        return tuple(
            since(change, change.entries[-1][0][0] if change.entries else change.file) for change in self.changes
        )

    @cached_property
    def in_journal_at(self) -> tuple[float, ...]:
        """Return the same of entries where any fsync commits all that changed before: with a journal of metadata."""
        syncs = sorted((sync.began, sync.ended) for sync in self.syncs)
        return tuple(
            min((ended for began, ended in syncs if began > change.ended), default=math.inf)
            if change.entries
            else durable_at
            for change, durable_at in zip(self.changes, self.durable_at, strict=True)
        )

    def tree(self, numbers: Iterable[int]) -> Tree:
        """Return the tree with some of the changes, by their numbers in order."""
        return {
            path: None if value in self.folders else self.content(value, changed)
            for path, value, changed in self.files(numbers)
        }

    def files(self, numbers: Iterable[int]) -> Iterator[tuple[str, int, tuple[int, ...]]]:
        """Yield what is there with some of the changes: paths, numbers, and those of the changes that are of a file."""
        entries, changed = dict(self.entries), dict[int, list[int]]()
        for number in numbers:
            change = self.changes[number]
            for entry, value in change.entries:
                if value is None:
                    entries.pop(entry, None)
                else:
                    entries[entry] = value
            if change.file >= 0:
                changed.setdefault(change.file, []).append(number)
        inner = dict[int, list[tuple[str, int]]]()
        for (folder, name), value in entries.items():
            inner.setdefault(folder, []).append((name, value))
        for path, value in self._below("", ROOT, inner):
            yield path, value, tuple(changed.get(value, ()))

    def _below(self, at: str, folder: int, inner: Mapping[int, list[tuple[str, int]]]) -> Iterator[tuple[str, int]]:
        for name, value in inner.get(folder, ()):
            yield f"{at}{name}", value
            if value in self.folders:
                yield from self._below(f"{at}{name}/", value, inner)

    def content(self, file: int, changed: tuple[int, ...]) -> bytes:
        """Return what a file holds with some of its changes."""
        key = file, changed
        if key not in self._cached:
            content = bytearray(self.contents.get(file, b""))
            length = len(content)
            for change in (self.changes[number] for number in changed):
                if change.length >= 0:
                    length = change.length if change.is_cut else max(length, change.length)
                    del content[length:]
                end = change.offset + len(change.data)
                content.extend(bytes(max(end - len(content), 0)))
                content[change.offset : end] = change.data
            content.extend(bytes(max(length - len(content), 0)))
            self._cached[key] = bytes(content[:length])
        return self._cached[key]

    @cached_property
    def _cached(self) -> dict[tuple[int, tuple[int, ...]], bytes]:
        return {}


def tree_of(folder: Path) -> Tree:
    """Return the tree below a folder."""
    tree: Tree = {}
    for at, folders, files in os.walk(folder):
        for name in folders:
            tree[str(Path(at, name).relative_to(folder))] = None
        for name in files:
            path = Path(at, name)
            tree[str(path.relative_to(folder))] = path.read_bytes()
    return tree


def replay(calls: Iterable[Call], folder: Path, before: Tree) -> Recording:
    """Return what calls changed below a folder that held a tree; StorageError if a call cannot be replayed."""
    disk = _Disk(os.path.realpath(folder), before)
    for call in calls:
        disk.take(call)
    return disk.recording()


class _Disk:
    """A folder as calls change it."""

    def __init__(self, root: str, before: Tree) -> None:
        self._root = root
        self._entries: dict[Entry, int] = {}
        self._folders, self._contents = {ROOT}, dict[int, bytearray]()
        self._number = ROOT
        self._places: dict[int, int] = {}  # of files, where the next write is
        self._appends, self._gone = set[int](), dict[str, int]()  # files open so; what had a path last
        self._changes, self._syncs, self._promises = list[Change](), list[Sync](), list[tuple[int, str, str]]()
        for path, content in sorted(before.items()):
            number = self._new(is_folder=content is None)
            self._entries[self._entry(path)] = number
            if content is not None:
                self._contents[number] = bytearray(content)
        self._first = dict(self._entries), {file: bytes(content) for file, content in self._contents.items()}

    def recording(self) -> Recording:
        """Return all of it."""
        entries, contents = self._first
        return Recording(
            entries, contents, frozenset(self._folders), tuple(self._changes), tuple(self._syncs), tuple(self._promises)
        )

    def take(self, call: Call) -> None:
        """Take a call; what it does outside of the folder is passed over."""
        if call.kind == "say":
            self._promises.append((call.began, call.data.decode(), call.host))
            return
        path, other = self._inner(call.path), self._inner(call.other)
        if path is not None or (other is not None and call.kind in ("rename", "link", "symlink")):
            if (path is None or other is None) and call.kind in ("rename", "link", "symlink"):
                raise StorageError(f"a recording holds a {call.kind} out of the folder or into it: {call}")
            act = getattr(self, f"_{call.kind}", None)
            if act is None:
                raise StorageError(f"a recording holds a {call.kind} of {call.path}, which is not replayed")
            act(call, path, other)

    def _create(self, call: Call, path: str, _: str | None) -> None:
        number = self._find(path)
        if number is None:
            number = self._new(is_folder=False)
            self._contents[number] = bytearray()
            self._enter(call, (self._entry(path), number))
        elif "O_TRUNC" in call.flags and self._contents[number]:
            self._set_length(call, number, 0, is_cut=True)
        self._places[number] = 0
        if "O_APPEND" in call.flags:
            self._appends.add(number)

    def _write(self, call: Call, path: str, _: str | None) -> None:
        self._put(call, self._open_file(call, path), call.data)

    def _copy(self, call: Call, path: str, other: str | None) -> None:
        source = None if other is None else self._find(other)
        if source is None:
            raise StorageError(f"a recording copies from {call.other}, which is out of the folder")
        begin = int(call.flags)
        self._put(call, self._open_file(call, path), bytes(self._contents[source][begin : begin + call.size]))

    def _put(self, call: Call, file: int, data: bytes) -> None:
        content, start = self._contents[file], call.offset
        if start < 0:
            start = len(content) if file in self._appends else self._places.get(file, 0)
            self._places[file] = start + len(data)
        if start + len(data) > len(content):
            self._set_length(call, file, start + len(data))
        at = start
        while at < start + len(data):
            end = min((at // BLOCK + 1) * BLOCK, start + len(data))
            block = data[at - start : end - start]
            self._changes.append(Change(call.began, call.ended, file=file, offset=at, data=block, host=call.host))
            at = end
        content[start : start + len(data)] = data

    def _extend(self, call: Call, path: str, _: str | None) -> None:
        file = self._open_file(call, path)
        if call.size > len(self._contents[file]):
            self._set_length(call, file, call.size)

    def _cut(self, call: Call, path: str, _: str | None) -> None:
        self._set_length(call, self._open_file(call, path), call.size, is_cut=True)

    def _seek(self, call: Call, path: str, _: str | None) -> None:
        number = self._found(call, path)
        if number is not None:
            self._places[number] = call.offset

    def _mkdir(self, call: Call, path: str, _: str | None) -> None:
        self._enter(call, (self._entry(path), self._new(is_folder=True)))

    def _rename(self, call: Call, path: str, other: str) -> None:
        number = self._must_find(path)
        self._forget(other)
        self._enter(call, (self._entry(path), None), (self._entry(other), number))

    def _link(self, call: Call, path: str, other: str) -> None:
        self._enter(call, (self._entry(other), self._must_find(path)))

    def _remove(self, call: Call, path: str, _: str | None) -> None:
        self._forget(path)
        self._enter(call, (self._entry(path), None))

    def _sync(self, call: Call, path: str, _: str | None) -> None:
        number = self._found(call, path)
        if number is not None:
            self._syncs.append(Sync(call.began, call.ended, number, path or ".", call.by, call.host))

    def _inner(self, path: str) -> str | None:
        if path == self._root:
            return ""
        return path[len(self._root) + 1 :] if path.startswith(f"{self._root}/") else None

    def _find(self, path: str) -> int | None:
        number: int | None = ROOT
        for part in Path(path).parts:
            number = None if number is None else self._entries.get((number, part))
        return number

    def _found(self, call: Call, path: str) -> int | None:
        return self._gone.get(path) if call.is_gone else self._find(path)

    def _must_find(self, path: str) -> int:
        number = self._find(path)
        if number is None:
            raise StorageError(f"a recording names {path}, which it did not make")
        return number

    def _open_file(self, call: Call, path: str) -> int:
        number = self._found(call, path)
        if number is None:
            raise StorageError(f"a recording writes to {path}, which it did not make")
        return number

    def _entry(self, path: str) -> Entry:
        folder, _, name = path.rpartition("/")
        return self._must_find(folder), name

    def _new(self, *, is_folder: bool) -> int:
        self._number += 1
        if is_folder:
            self._folders.add(self._number)
        return self._number

    def _forget(self, path: str) -> None:
        number = self._find(path)
        if number is not None:
            self._gone[path] = number

    def _enter(self, call: Call, *entries: tuple[Entry, int | None]) -> None:
        self._changes.append(Change(call.began, call.ended, entries, host=call.host))
        for entry, value in entries:
            if value is None:
                self._entries.pop(entry, None)
            else:
                self._entries[entry] = value

    def _set_length(self, call: Call, file: int, length: int, *, is_cut: bool = False) -> None:
        change = Change(call.began, call.ended, file=file, length=length, is_cut=is_cut, host=call.host)
        self._changes.append(change)
        content = self._contents[file]
        del content[length:]
        content.extend(bytes(length - len(content)))
