"""BlockCache: a bounded folder of immutable, verified blocks that any number of processes of a machine share.

A block gets its name when it is whole, by a link or a rename, and a name says all about the content: no process trusts
another's memory. A killed process leaves a locked byte, which the kernel frees, and at most a hidden file, which a
later eviction removes. Whoever finds the cache full removes the blocks used longest ago, sparing those that it needs
soon. The folder of a machine start that is over is removed: after a loss of power blocks may hold anything.

A lock is waited for at most `PATIENCE_S`; then its owner is taken for stopped, and the block is fetched twice.
"""

import errno
import fcntl
import os
import shutil
import struct
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from datakit.files.durable import reading
from datakit.remote.native import cache_library
from datakit.store.kept_open import Bound
from datakit.store.shard import map_open, mapped_at
from datakit.store.shard_file import ShardFile
from threefold.backoff import Backoff
from threefold.errors import StorageError, UserError
from threefold.storage import Buffer, open_storage, temporary_name

PATIENCE_S = 60.0
# blocks of about a MiB that all its stores keep mapped: as many as fill half of it, within what a process may map
LEAST_MAPPED, MOST_MAPPED, MAPPED_BYTES_EACH = 32, 1 << 14, 2 << 20
ROOM_PART = 16  # an eviction frees this part of the cache beyond what is asked for, so that few look through it
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_COUNT = struct.Struct("<q")  # bytes that the blocks have, about
_LOCKS, _IN_USE = ".locks", ".in-use"
_NO_NAMELESS = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)  # of a file system all of whose files have names


class BlockCache:
    """Blocks by name; safe to use from several threads and processes, and after a fork.

    `needed` has the names of blocks that this process reads soon. `bytes_added` counts what it put into the cache.
    `mapped` bounds how many blocks are kept mapped.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Make the folder, if it is not there; StorageError if it cannot be written."""
        self.place, self.max_bytes, self.needed, self.bytes_added = folder, max_bytes, set[str](), 0
        self.mapped = Bound(min(MOST_MAPPED, max(LEAST_MAPPED, max_bytes // MAPPED_BYTES_EACH)))
        self._turns = dict[int, threading.Lock]()  # of each process, whose threads need not look again and again
        self._folder = folder / _BOOT_ID.read_text().strip()
        with self._writing():
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._locks = os.fspath(self._folder / _LOCKS)
            os.close(os.open(self._locks, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._in_use = _hold(self._folder / _IN_USE, fcntl.LOCK_SH)
            self._remove_former()

    def get(self, name: str, size_bytes: int, make: Callable[[], Buffer]) -> ShardFile:
        """Return the open file of a block; if it is not there, `make` fetches it, in one process at a time."""
        file = self._open(name, size_bytes)
        if file is None:
            with self._locked(_lock_of(name)):
                file = self._open(name, size_bytes)
                if file is None:
                    content = make()
                    with self._room_for([(name, size_bytes)], [content]):
                        file = self._write(self._folder / name, content)
        return file

    def memory(self, name: str, size_bytes: int, make: Callable[[], Buffer]) -> npt.NDArray[np.uint8]:
        """Return the bytes of a block, fetched as by `get`, mapped: so they keep their room on the disk.

        As of any mapped file, reading what somebody has cut off meanwhile ends the process.
        """
        [memory] = self.mapped_blocks([(name, size_bytes)])
        if memory is not None:
            return memory
        file = self.get(name, size_bytes, make)
        with reading(file.path):
            return np.asarray(map_open(file.descriptor))

    def mapped_blocks(self, blocks: Sequence[tuple[str, int]]) -> list[npt.NDArray[np.uint8] | None]:
        """Return the bytes of those of some blocks, names with sizes, that are there, mapped as by `memory`."""
        sizes, addresses = array("q", (size for _, size in blocks)), array("q", bytes(8 * len(blocks)))
        with self._writing():
            _checked(
                cache_library().dk_map_blocks(
                    *self._named(blocks), sizes.buffer_info()[0], len(blocks), addresses.buffer_info()[0]
                )
            )
        return [mapped_at(address, size) if address else None for address, size in zip(addresses, sizes)]

    def fill(self, blocks: Sequence[tuple[str, int]], make: Callable[[int, int], Sequence[Buffer]]) -> None:
        """Fetch those of some blocks, names with sizes, that are not there; `make(i, j)` returns blocks [i, j)."""
        if not self._missing(blocks):
            return
        places = sorted(_lock_of(name) for name, _ in blocks)  # in one order, so no two wait for each other
        with self._locked(*places):
            for first, stop in self._missing(blocks):
                contents = make(first, stop)
                with self._room_for(blocks[first:stop], contents):
                    self._write_all(blocks[first:stop], contents)

    def _missing(self, blocks: Sequence[tuple[str, int]]) -> list[tuple[int, int]]:
        """Return which of the blocks are not there, as ranges [first, stop); the others count as used."""
        sizes, there = array("q", (size for _, size in blocks)), array("q", bytes(8 * len(blocks)))
        with self._writing():
            code = cache_library().dk_find_blocks(
                *self._named(blocks), sizes.buffer_info()[0], len(blocks), there.buffer_info()[0]
            )
            _checked(code)
        found: list[tuple[int, int]] = []
        for number, is_there in enumerate(there):
            if not is_there:
                first = found.pop()[0] if found and found[-1][1] == number else number
                found.append((first, number + 1))
        return found

    def _open(self, name: str, size_bytes: int) -> ShardFile | None:
        path = self._folder / name
        try:
            file = ShardFile(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._failure(error) from error
        found = os.fstat(file.descriptor)
        if found.st_size != size_bytes:  # somebody cut it
            path.unlink(missing_ok=True)
            return None
        if time.time() - found.st_mtime > 1:  # the time of its last use, about
            with suppress(OSError):
                os.utime(file.descriptor)
        return file

    @contextmanager
    def _room_for(self, blocks: Sequence[tuple[str, int]], contents: Sequence[Buffer]) -> Iterator[None]:
        """Make room for blocks that are about to be written."""
        assert [len(content) for content in contents] == [size for _, size in blocks], "a block's name says its size"
        size_bytes = sum(size for _, size in blocks)
        if size_bytes > self.max_bytes:
            raise UserError(
                f"a block of {size_bytes} bytes does not fit into the cache {self.place} of {self.max_bytes} bytes",
                hint=f"--data.cache-mib {-(-16 * size_bytes >> 20)}, or more",
            )
        with self._writing():
            self._make_room(size_bytes)
            yield
        self.bytes_added += size_bytes

    def _write_all(self, blocks: Sequence[tuple[str, int]], contents: Sequence[Buffer]) -> None:
        """Write blocks in one call, as each call costs a thread the interpreter."""
        sizes = array("q", (size for _, size in blocks))
        addresses = array("q", (np.frombuffer(content, np.uint8).ctypes.data for content in contents))
        code = cache_library().dk_write_blocks(
            *self._named(blocks), addresses.buffer_info()[0], sizes.buffer_info()[0], len(blocks)
        )
        if -code not in _NO_NAMELESS:
            _checked(code)
            return
        for (name, _), content in zip(blocks, contents):
            self._write(self._folder / name, content)

    def _named(self, blocks: Sequence[tuple[str, int]]) -> tuple[bytes, bytes]:
        """Return the folder and the names of blocks as native code takes them."""
        return os.fsencode(self._folder), "\0".join(name for name, _ in blocks).encode()

    def _write(self, path: Path, content: Buffer) -> ShardFile:
        """Write a block without a name, then name it: nobody sees a part of one."""
        temporary = None
        try:
            descriptor = os.open(self._folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in _NO_NAMELESS:
                raise
            temporary = path.with_name(temporary_name(path.name))  # of a file system that knows names only
            descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        file, rest = ShardFile(path, descriptor), memoryview(content)
        try:
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            if temporary:
                temporary.replace(path)
            else:
                with suppress(FileExistsError):  # of one whose owner was taken for stopped
                    os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=descriptor)  # with it links are followed
        except BaseException:
            if temporary:
                temporary.unlink(missing_ok=True)
            raise
        return file

    def _make_room(self, size_bytes: int) -> None:
        """Count blocks that are about to come, and remove others if the cache would be too large."""
        turn = self._turns.setdefault(os.getpid(), threading.Lock())  # a lock that a fork copied may never be released
        with turn, self._locked(0) as descriptor:
            found = os.pread(descriptor, _COUNT.size, 0)
            used = (_COUNT.unpack(found)[0] if len(found) == _COUNT.size else 0) + size_bytes
            if used > self.max_bytes:  # the count may be too high, as killed processes counted what never came
                used = self._evict(self.max_bytes - size_bytes) + size_bytes
            os.pwrite(descriptor, _COUNT.pack(used), 0)

    def _evict(self, most: int) -> int:
        """Remove blocks until the others have at most so many bytes, and a good deal less; return what they have."""
        needed = tuple(self.needed)
        with self._writing():
            left = cache_library().dk_evict_blocks(
                os.fsencode(self._folder), "\0".join(needed).encode(), len(needed), most,
                max(0, most - self.max_bytes // ROOM_PART),
            )  # fmt: skip
            return _checked(left)

    @contextmanager
    def _locked(self, *places: int) -> Iterator[int]:
        """Lock bytes of the file of locks, and yield its descriptor. The kernel frees them if this process dies."""
        with self._writing():
            descriptor = os.open(self._locks, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            backoff = Backoff(0.001, max_s=0.01, within_s=PATIENCE_S)
            rest = array("q", places)
            while rest := rest[self._lock(descriptor, rest) :]:
                if (pause_s := backoff.next_s()) is None:
                    rest.pop(0)  # its owner is taken for stopped
                else:
                    time.sleep(pause_s)
            yield descriptor
        finally:
            os.close(descriptor)

    def _lock(self, descriptor: int, places: "array[int]") -> int:
        """Lock bytes one after the other; return how many, before the first that another holds."""
        with self._writing():
            return _checked(cache_library().dk_lock_bytes(descriptor, places.buffer_info()[0], len(places)))

    def _remove_former(self) -> None:
        """Remove what other starts of the machine left, if no process holds it: another node's it may be."""
        for other in self.place.iterdir():
            if other == self._folder or not (other / _IN_USE).is_file():
                continue
            with suppress(BlockingIOError):
                descriptor = _hold(other / _IN_USE, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(other, ignore_errors=True)
                os.close(descriptor)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> StorageError:
        hint = "--data.cache FOLDER that can be written"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = f"make room, or --data.cache-mib less than {max(2, self.max_bytes >> 20)}, or another --data.cache"
        return StorageError(f"cannot use the cache {self.place}: {error.strerror or error}", hint=hint)


def shared_cache(folder: str | Path, cache_mib: int) -> BlockCache:
    """Return the cache in a folder, the same for all stores of the process; errors as of BlockCache.

    UserError if it is not a folder of this machine, or of so many MiB.
    """
    if not isinstance(cache_mib, int) or cache_mib < 1:
        raise UserError(f"a cache has a whole number of MiB, 1 or more, not {cache_mib!r}", hint="cache_mib=10240")
    if "://" in str(folder):
        raise UserError(f"the cache {folder} is not a folder of this machine", hint="--data.cache /local/cache")
    open_storage(folder)  # refuses "~", which only a shell knows, and what is not a path
    return _cache_in(Path(folder), cache_mib << 20)


@cache
def _cache_in(folder: Path, max_bytes: int) -> BlockCache:
    return BlockCache(folder, max_bytes)


def _checked(result: int) -> int:
    """Return what a native function did, or raise the OSError of a negative errno."""
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    return result


def _lock_of(name: str) -> int:
    """Return the byte of the file of locks that a block has; byte 0 is the count's."""
    return 1 + xxhash.xxh3_64_intdigest(name.encode()) % (1 << 60)


def _hold(path: Path, how: int) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, how)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
