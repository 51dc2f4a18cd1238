"""CacheFolder: the folder of a cache and its room, which all processes of the machine share.

All that takes room on the disk is counted, in pages: blocks, what processes hold of them, and what is being written. To
make room the blocks used longest ago are removed, but for what is held. Packing indices are held up to a quarter of the
bound, and with the files of shards, in equal parts for all processes, up to half. Blocks are held up to half of the
rest, in equal parts: so there is always room for a quarter. With 1,000 MiB, of which the files of shards take 200, each
of four processes holds 100 MiB of blocks at most.

A folder that somebody removed is made again by whoever needs it next. A full disk is made room on as a full cache is.
The folder of a machine start that is over is removed: after a loss of power blocks may hold anything.
"""

import errno
import fcntl
import itertools
import os
import shutil
import struct
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar
from weakref import finalize

from datakit.format.native import library
from datakit.shards.holdings import Holdings, Kind
from datakit.shards.kept_open import Bound
from threefold.backoff import Backoff
from threefold.errors import StorageError, UserError
from threefold.storage.folders import opened

Value = TypeVar("Value")
ROOM_PATIENCE_S = 30.0  # room that others hold is waited for so long
MOST_MAPPED, MOST_OPEN, MOST_FILES = 1 << 14, 32, 128  # blocks that are mapped or open, and whole files, of all stores
SHARED_PART, FILES_PART = 4, 2  # these parts of the cache may be held for packing indices, and for all whole files
ROOM_PART = 16  # an eviction frees this part of the cache beyond what is asked for, so that few look through it
AHEAD_PART = 0.85  # of the room beside whole files
PAGE_BYTES = 4096  # a file takes whole pages
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_HEADER = struct.Struct("<qq")  # bytes that all files have, about, and processes
_LOCKS, _IN_USE = ".locks", ".in-use"
_FULL = (errno.ENOSPC, errno.EDQUOT)


def larger_cache(least_mib: int) -> str:
    """Return the hint that asks for a larger cache: of a configuration's flag, and of a program's argument."""
    return f"--data.cache-mib {least_mib}, or more; cache_mib={least_mib} in a program"


class CacheFolder:
    """Safe to use from several threads and processes, and after a fork.

    `needed` has the names of blocks that this process reads soon. `mapped` and `opened` bound how many blocks are kept
    so, and `files` how many whole files.
    """

    patience_s = 60.0  # a lock is waited for so long; then its owner is taken for stopped

    def __init__(self, place: Path, max_bytes: int, open_files: int) -> None:
        """Make the folder, if it is not there; StorageError if it cannot be written."""
        self.place, self.max_bytes, self.needed = place, max_bytes, set[str]()
        self.mapped, self.opened, self.files = Bound(MOST_MAPPED), Bound(min(MOST_OPEN, open_files)), Bound(MOST_FILES)
        self.path = place / _BOOT_ID.read_text().strip()
        self._locks = os.fspath(self.path / _LOCKS)
        self._turns = dict[int, threading.Lock]()  # of each process, whose threads need not look again and again
        self._rooms = itertools.count()
        self._num_processes, self._looked_s = 1, 0.0
        with self.failures():
            self._begin()

    @property
    def most_bytes(self) -> int:
        """Return the bound of what is counted: folders and locks are not."""
        return self.max_bytes - min(self.max_bytes // 64, 1 << 20)

    @property
    def ahead_bytes(self) -> int:
        """Return how many bytes of blocks that are read soon it has room for, beside those that were just read."""
        held = self.holdings.num_bytes
        return int(AHEAD_PART * (self.most_bytes - held[Kind.FILE] - held[Kind.SHARED]))

    @property
    def holdings(self) -> Holdings:
        """What this process holds; a forked one begins with nothing."""
        if self._holdings.process != os.getpid():
            for bound in (self.mapped, self.opened, self.files):
                bound.shrink(0)
            self._begin()
        return self._holdings

    def _begin(self) -> None:
        """Make what is not there, and take part in the cache."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._in_use = _Descriptor(_hold(self.path / _IN_USE, fcntl.LOCK_SH))
        self._remove_former()
        with self._counting() as descriptor:
            self._holdings = Holdings(self.path)
            self._note(descriptor, self._evict(sys.maxsize))

    def retried(self, act: Callable[[], Value]) -> Value:
        """Return what `act` does, once more in a new folder if it finds that the folder was removed."""
        with self.failures():
            try:
                return act()
            except FileNotFoundError:
                self._begin()
                return act()

    def may_hold(self, num_bytes: int, kind: Kind) -> bool:
        """Return whether this process may hold so much more, after it let go what it used longest ago."""
        bounds = {Kind.BLOCK: (self.mapped, self.opened), Kind.FILE: (self.files,), Kind.SHARED: (self.files,)}[kind]
        while num_bytes > self._free_to_hold(kind):
            if not any(bound.drop_oldest() for bound in bounds):
                return False
        return True

    def _free_to_hold(self, kind: Kind) -> int:
        sizes = self.holdings.num_bytes
        if time.monotonic() > self._looked_s + 1:
            self._look()
        num, most = self._num_processes, self.most_bytes
        files = sizes[Kind.FILE] + sizes[Kind.SHARED] // num
        if kind is Kind.BLOCK:
            return (most // num - files) // 2 - sizes[kind]
        of_files = most // num // FILES_PART - files
        return of_files if kind is Kind.FILE else min(num * of_files, most // SHARED_PART - sizes[kind])

    def _look(self) -> None:
        """Learn how many processes use the cache."""
        with suppress(OSError), opened(self._locks, os.O_RDONLY | os.O_CLOEXEC) as descriptor:
            self._header(descriptor)

    @contextmanager
    def room(self, num_bytes: int) -> Iterator[str]:
        """Make room for what is about to be written, and yield the name of a file that keeps it.

        UserError if there is none beside what processes hold.
        """
        backoff = Backoff(0.01, max_s=0.1, within_s=ROOM_PATIENCE_S)
        while (name := self.retried(lambda: self._reserve(num_bytes))) is None:
            if self._let_go():
                continue
            if (pause_s := backoff.next_s()) is None:
                raise UserError(
                    f"the cache {self.place} of {self.max_bytes} bytes has no room for {num_bytes} more beside what "
                    f"{self._num_processes} processes hold of it",
                    hint=larger_cache(-(-2 * (self.max_bytes + num_bytes) >> 20)),
                )
            time.sleep(pause_s)
        try:
            yield name
        finally:
            with suppress(OSError):
                (self._holdings.folder / name).unlink()

    def _reserve(self, num_bytes: int) -> str | None:
        """Count what is about to come, after others were removed if need be; None if it has no room."""
        name, holdings = f".{next(self._rooms)}.room", self.holdings
        with self._counting() as descriptor:
            used = self._header(descriptor) + num_bytes
            if used > self.most_bytes:  # the count may be too high, as killed processes counted what never came
                used = self._evict(max(0, self.most_bytes - num_bytes)) + num_bytes
            if used > self.most_bytes:
                self._note(descriptor, used - num_bytes)
                return None
            (holdings.folder / name).touch(0o600, exist_ok=False)
            os.truncate(holdings.folder / name, num_bytes)
            self._note(descriptor, used)
        return name

    def make_free(self, num_bytes: int) -> bool:
        """Make room on a disk that is full; False if nothing can be removed."""
        with self._counting() as descriptor:
            before = self._evict(sys.maxsize)
            left = self._evict(max(0, before - num_bytes))
            self._note(descriptor, left)
        return left < before or self._let_go()

    def _let_go(self) -> bool:
        """Keep half of what is open or mapped; False if nothing is."""
        return sum(bound.halve() for bound in (self.mapped, self.opened, self.files)) > 0

    def _evict(self, most: int) -> int:
        """Remove blocks until all has at most so many bytes, and a good deal less; return what it has."""
        needed, num_processes = tuple(self.needed), array("q", [0])
        left: int = library().dk_evict_blocks(
            os.fsencode(self.path), "\0".join(needed).encode(), len(needed), most,
            max(0, most - self.max_bytes // ROOM_PART), num_processes.buffer_info()[0],
        )  # fmt: skip
        checked(left)
        self._num_processes = max(1, num_processes[0])
        return left

    def _header(self, descriptor: int) -> int:
        """Return the bytes that were noted, and learn the number of processes."""
        header = os.pread(descriptor, _HEADER.size, 0)
        used: int
        used, num_processes = _HEADER.unpack(header) if len(header) == _HEADER.size else (0, 1)
        self._num_processes, self._looked_s = max(1, num_processes), time.monotonic()
        return used

    def _note(self, descriptor: int, used: int) -> None:
        os.pwrite(descriptor, _HEADER.pack(used, self._num_processes), 0)

    @contextmanager
    def _counting(self) -> Iterator[int]:
        """Let nobody else count, and yield the file of locks, which begins with the header."""
        turn = self._turns.setdefault(os.getpid(), threading.Lock())  # a lock that a fork copied may never be released
        with turn, self.locked(0) as descriptor:
            yield descriptor

    @contextmanager
    def locked(self, *places: int) -> Iterator[int]:
        """Lock bytes of the file of locks, and yield its descriptor. The kernel frees them if this process dies."""
        descriptor = self._open_locks()
        try:
            backoff = Backoff(0.001, max_s=0.01, within_s=self.patience_s)
            rest = array("q", places)
            while rest := rest[self._lock(descriptor, rest) :]:
                if (pause_s := backoff.next_s()) is None:
                    rest.pop(0)  # its owner is taken for stopped
                else:
                    time.sleep(pause_s)
            yield descriptor
        finally:
            os.close(descriptor)

    def _open_locks(self) -> int:
        with self.failures():
            try:
                return _opened(self._locks)
            except FileNotFoundError:  # the folder was removed
                self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
                return _opened(self._locks)

    def _lock(self, descriptor: int, places: "array[int]") -> int:
        """Lock bytes one after the other; return how many, before the first that another holds."""
        with self.failures():
            return checked(library().dk_lock_bytes(descriptor, places.buffer_info()[0], len(places)))

    def _remove_former(self) -> None:
        """Remove what other starts of the machine left, if no process holds it: another node's it may be."""
        for other in self.place.iterdir():
            if other == self.path or not (other / _IN_USE).is_file():
                continue
            with suppress(BlockingIOError):
                descriptor = _hold(other / _IN_USE, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(other, ignore_errors=True)
                os.close(descriptor)

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Raise a StorageError in place of an OSError."""
        try:
            yield
        except OSError as error:
            hint = "--data.cache FOLDER that can be written, or cache=FOLDER in a program"
            if is_full(error):
                most = max(2, self.max_bytes >> 20)
                hint = f"make room, or --data.cache-mib (cache_mib in a program) below {most}, or another cache"
            raise StorageError(f"cannot use the cache {self.place}: {error.strerror or error}", hint=hint) from error


class _Descriptor:
    """A descriptor that is closed with the last reference."""

    def __init__(self, number: int) -> None:
        self.close = finalize(self, os.close, number)
        self.close.atexit = False


def is_full(error: OSError) -> bool:
    """Return whether an error says that a disk is full."""
    return error.errno in _FULL


def checked(result: int) -> int:
    """Return what a native function did, or raise the OSError of a negative errno."""
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    return result


def pages(sizes: Iterable[int]) -> int:
    """Return the bytes that files of these sizes take on a disk."""
    return sum(-(-size // PAGE_BYTES) for size in sizes) * PAGE_BYTES


def _opened(path: Path | str) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _hold(path: Path, how: int) -> int:
    descriptor = _opened(path)
    try:
        fcntl.flock(descriptor, how)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
