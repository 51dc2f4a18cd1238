"""BlockCache: a bounded folder of immutable, verified blocks that any number of processes of a machine share.

A block gets its name when it is whole, by a rename, and a name says all about the content: no process trusts another's
memory. A killed process leaves a locked byte, which the kernel frees, and a folder of its own, which a later eviction
removes. Whoever finds the cache full removes the blocks used longest ago, sparing those that it needs soon.

What is open or mapped keeps its room on the disk, so it is held where others see it, and within the bound. What may not
be held is read instead. Blocks of 1 MiB in a cache of 8 MiB: four of them may be mapped, a fifth is read.
"""

import os
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import xxhash

from datakit.files.durable import reading
from datakit.format.native import library
from datakit.format.shard import Int64s, mapped_at
from datakit.shards.cache_folder import CacheFolder, checked, is_full, larger_cache, pages
from datakit.shards.holdings import Kind
from datakit.shards.shard_file import OPEN_FILES, ShardFile
from threefold.errors import UserError
from threefold.storage import Buffer, open_storage

_caches, _lock = WeakValueDictionary[Path, "BlockCache"](), threading.Lock()
FITTING_PART = 4  # so much is always free of what processes hold
WRITTEN_PART = 8  # this part of the cache is written at once, as room for it there always is


class NotHeldError(Exception):
    """A block may not be mapped, as the cache would have no room for others."""


class BlockCache:
    """Blocks by name; safe to use from several threads and processes, and after a fork.

    `needed` has the names of blocks that this process reads soon. `bytes_added` counts what it put into the cache.
    `mapped`, `opened` and `files` bound how many blocks are kept mapped or open, and how many whole files. `is_used` is
    set by the first batch.
    """

    def __init__(self, place: Path, max_bytes: int) -> None:
        """Make the folder, if it is not there; StorageError if it cannot be written."""
        self.folder = folder = CacheFolder(place, max_bytes, OPEN_FILES.most)
        self.place, self.needed, self.bytes_added = folder.place, folder.needed, 0
        self.mapped, self.opened, self.files = folder.mapped, folder.opened, folder.files
        self.is_used = False

    def check_step(self, blocks: Int64s) -> None:
        """Raise UserError if the blocks of these sizes, which are mapped for a first batch, are more than the cache."""
        num_bytes, largest = int(blocks.sum()), pages([int(blocks.max(initial=0))])
        if num_bytes > self.folder.max_bytes and not self.is_used:
            raise UserError(
                f"the cache {self.place} has {self.folder.max_bytes} bytes, "
                f"and a step maps {num_bytes} bytes of blocks",
                hint=larger_cache(max(-(-num_bytes >> 20), _least_mib(largest))),
            )
        self.is_used = True

    def get(self, name: str, size_bytes: int, make: Callable[[], Buffer]) -> ShardFile:
        """Return the open file of a block; if it is not there, `make` fetches it, in one process at a time.

        It is not kept if it may not be held for longer than it is read.
        """
        file = self._opened(name, size_bytes, make)
        file.is_kept = file.is_kept and self.folder.may_hold(0, Kind.BLOCK)  # it is counted already
        return file

    def _opened(self, name: str, size_bytes: int, make: Callable[[], Buffer]) -> ShardFile:
        file = self._open(name, size_bytes)
        while file is None:
            with self.folder.locked(_lock_of(name)):
                file = self._open(name, size_bytes)
                if file is None:
                    self._write([(name, size_bytes)], [make()])
                    file = self._open(name, size_bytes)
        return file

    def memory(
        self, name: str, size_bytes: int, make: Callable[[], Buffer], kind: Kind = Kind.FILE
    ) -> npt.NDArray[np.uint8]:
        """Return the bytes of a whole file of a store, fetched as by `get`, mapped; a copy if it may not be held.

        As of any mapped file, reading what somebody has cut off meanwhile ends the process.
        """
        memory = self.mapped_block(name, size_bytes, make, kind)
        if memory is not None:
            return memory
        file = self._open(name, size_bytes)
        if file is None:
            return np.array(np.frombuffer(make(), np.uint8))
        with reading(file.path):
            return np.frombuffer(os.pread(file.descriptor, size_bytes, 0), np.uint8)

    def mapped_block(
        self, name: str, size_bytes: int, make: Callable[[], Buffer], kind: Kind = Kind.BLOCK
    ) -> npt.NDArray[np.uint8] | None:
        """Return the bytes of a block, fetched as by `get`, mapped as by `memory`; None if it may not be held."""
        [memory] = self.mapped_blocks([(name, size_bytes)], kind)
        if memory is None and self.folder.may_hold(pages([size_bytes]), kind):
            self._opened(name, size_bytes, make)
            [memory] = self.mapped_blocks([(name, size_bytes)], kind)
        return memory

    def mapped_blocks(
        self, blocks: Sequence[tuple[str, int]], kind: Kind = Kind.BLOCK
    ) -> list[npt.NDArray[np.uint8] | None]:
        """Return the bytes of those of some blocks, names with sizes, that are there and may be held, mapped."""
        num_held, held_bytes = 0, 0
        for _, size in blocks:
            held_bytes += pages([size])
            if not self.folder.may_hold(held_bytes, kind):
                break
            num_held += 1
        found = self.folder.retried(lambda: self._map(blocks[:num_held], kind))
        return [*found, *[None] * (len(blocks) - num_held)]

    def _map(self, blocks: Sequence[tuple[str, int]], kind: Kind) -> list[npt.NDArray[np.uint8] | None]:
        sizes, addresses = array("q", (size for _, size in blocks)), array("q", bytes(8 * len(blocks)))
        holdings, mapped = self.folder.holdings, list[npt.NDArray[np.uint8] | None]()
        with holdings.linking():
            code = library().dk_map_blocks(
                os.fsencode(self.folder.path), os.fsencode(holdings.folder), _joined(blocks),
                sizes.buffer_info()[0], len(blocks), addresses.buffer_info()[0],
            )  # fmt: skip
            checked(code)
            for (name, size), address in zip(blocks, addresses):
                if address:
                    holdings.add(name, pages([size]), kind)
                mapped.append(mapped_at(address, size, partial(holdings.release, name)) if address else None)
        return mapped

    def fill(self, blocks: Sequence[tuple[str, int]], make: Callable[[int, int], Sequence[Buffer]]) -> None:
        """Fetch those of some blocks, names with sizes, that are not there; `make(i, j)` returns blocks [i, j)."""
        if not self._missing(blocks):
            return
        places = sorted(_lock_of(name) for name, _ in blocks)  # in one order, so no two wait for each other
        with self.folder.locked(*places):
            for first, stop in self._missing(blocks):
                self._write(blocks[first:stop], make(first, stop))

    def _missing(self, blocks: Sequence[tuple[str, int]]) -> list[tuple[int, int]]:
        """Return which of the blocks are not there, as ranges [first, stop); the others count as used."""
        sizes, flags = array("q", (size for _, size in blocks)), array("q", bytes(8 * len(blocks)))
        folder, names = os.fsencode(self.folder.path), _joined(blocks)
        find = library().dk_find_blocks
        self.folder.retried(
            lambda: checked(find(folder, names, sizes.buffer_info()[0], len(blocks), flags.buffer_info()[0]))
        )
        missing: list[tuple[int, int]] = []
        for number, is_there in enumerate(flags):
            if not is_there:
                first = missing.pop()[0] if missing and missing[-1][1] == number else number
                missing.append((first, number + 1))
        return missing

    def _open(self, name: str, size_bytes: int) -> ShardFile | None:
        """Return the open file of a block, held; None if it is not there. Where files have one name each, not held."""
        path, holdings = self.folder.path / name, self.folder.holdings
        own = holdings.folder / name
        with self.folder.failures(), holdings.linking():
            try:
                is_linked = _is_linked(path, own)
                descriptor = os.open(own if is_linked else path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
            status = os.fstat(descriptor)
            if status.st_size != size_bytes:  # somebody cut it
                os.close(descriptor)
                path.unlink(missing_ok=True)
                own.unlink(missing_ok=True)
                return None
            if time.time() - status.st_mtime > 1:  # the time of its last use, about
                with suppress(OSError):
                    os.utime(descriptor)
            if not is_linked:
                return ShardFile(path, descriptor, is_kept=False)
            holdings.add(name, pages([size_bytes]), Kind.BLOCK)
            return ShardFile(path, descriptor, closed=partial(holdings.release, name))

    def _write(self, blocks: Sequence[tuple[str, int]], contents: Sequence[Buffer]) -> None:
        """Write blocks, after others were removed if need be."""
        assert [len(content) for content in contents] == [size for _, size in blocks], "a block's name says its size"
        for first, stop in _parts([size for _, size in blocks], self.folder.max_bytes // WRITTEN_PART):
            self._write_part(blocks[first:stop], contents[first:stop])

    def _write_part(self, blocks: Sequence[tuple[str, int]], contents: Sequence[Buffer]) -> None:
        num_bytes = pages(size for _, size in blocks)
        if num_bytes > self.folder.most_bytes // FITTING_PART:
            raise UserError(
                f"a block of {num_bytes} bytes does not fit into a quarter of the cache {self.place}, as it has to: "
                f"that has {self.folder.max_bytes} bytes",
                hint=larger_cache(_least_mib(num_bytes)),
            )
        self.folder.retried(lambda: self._write_all(blocks, contents, num_bytes))
        self.bytes_added += sum(size for _, size in blocks)

    def _write_all(self, blocks: Sequence[tuple[str, int]], contents: Sequence[Buffer], num_bytes: int) -> None:
        """Write blocks in one call, as each call costs a thread the interpreter; again if the disk was full."""
        sizes = array("q", (size for _, size in blocks))
        addresses = array("q", (np.frombuffer(content, np.uint8).ctypes.data for content in contents))
        while True:
            try:
                with self.folder.room(num_bytes) as room:
                    checked(
                        library().dk_write_blocks(
                            os.fsencode(self.folder.path), os.fsencode(self.folder.holdings.folder), room.encode(),
                            _joined(blocks), addresses.buffer_info()[0], sizes.buffer_info()[0], len(blocks),
                        )
                    )  # fmt: skip
                return
            except OSError as error:
                if not is_full(error) or not self.folder.make_free(num_bytes):
                    raise


def shared_cache(folder: str | Path, cache_mib: int) -> BlockCache:
    """Return the cache in a folder, the same for all stores of the process; errors as of BlockCache.

    UserError if it is not a folder of this machine, or of so many MiB. Of several figures the least holds,
    unless the folder was removed meanwhile.
    """
    if not isinstance(cache_mib, int) or cache_mib < 1:
        raise UserError(f"a cache has a whole number of MiB, 1 or more, not {cache_mib!r}", hint="cache_mib=10240")
    if "://" in str(folder):
        raise UserError(
            f"the cache {folder} is not a folder of this machine",
            hint="--data.cache /local/cache, or cache='/local/cache' in a program",
        )
    open_storage(folder)  # refuses "~", which only a shell knows, and what is not a path
    place, max_bytes = Path(folder).absolute(), cache_mib << 20
    with _lock:
        cache = _caches.get(place)
        if cache is None or not place.exists():  # then it bounds nothing, whoever holds it still
            cache = _caches[place] = BlockCache(place, max_bytes)
        cache.folder.max_bytes = min(cache.folder.max_bytes, max_bytes)
    return cache


def _least_mib(block_bytes: int) -> int:
    """Return the size of the least cache into a quarter of which a block fits, beside folders and locks: a 64th."""
    return -(-block_bytes * FITTING_PART * 64 // 63 >> 20)


def _is_linked(path: Path, own: Path) -> bool:
    """Give a file a second name, if it has it not yet; return whether it has it, as files may have one name each."""
    try:
        os.link(path, own)
    except FileExistsError:
        return True
    except FileNotFoundError:
        raise
    except OSError:
        return False
    return True


def _joined(blocks: Iterable[tuple[str, int]]) -> bytes:
    """Return the names of blocks as native code takes them."""
    return "\0".join(name for name, _ in blocks).encode()


def _parts(sizes: Sequence[int], most_bytes: int) -> list[tuple[int, int]]:
    """Return ranges [first, stop) of at most so many bytes each, or of one size: of 3, 4, 5 and 9, with 8, three."""
    parts = list[tuple[int, int]]()
    for number, size in enumerate(sizes):
        if parts and sum(sizes[parts[-1][0] : number]) + size <= most_bytes:
            parts[-1] = parts[-1][0], number + 1
        else:
            parts.append((number, number + 1))
    return parts


def _lock_of(name: str) -> int:
    """Return the byte of the file of locks that a block has, after those of the header."""
    return 16 + xxhash.xxh3_64_intdigest(name.encode()) % (1 << 60)
