"""Staging: the tokens of a batch's spans whose shards are not mapped, put into memory in as few requests as may be.

Spans of a remote store are in the mapped blocks of its cache, if the batch reads much of these. All others are read
into one buffer: they are sorted by shard and place; those that overlap or nearly touch are one read. All reads of up to
64 files are one call of csrc/datakit/reads.cpp, without the GIL, on several threads. Two spans of 8 KiB at bytes 0 and
12,288 of a shard are one read of 20,480 bytes, and begin at bytes 0 and 12,288 of the buffer.
"""

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from datakit.batches.batch import Bytes
from datakit.format.native import READ, address_of, library
from datakit.format.shard import Int64s
from datakit.shards import shard_tokens
from datakit.shards.cached_shards import MAPPED_PART, CachedShards
from datakit.shards.shard_file import OPEN_FILES, FilePiece
from datakit.shards.shards import Shards
from threefold.errors import CheckFailed, StorageError, quoted

MAX_GAP_BYTES = 16 << 10  # is read along, as a further request would cost more
MAX_FILES = 64  # open at once for one batch
MAX_THREADS = 16
Bools = npt.NDArray[np.bool_]
_FILE_BITS = 44  # of a place in a file; a batch's shards have the rest of 63


def stage(shards: Sequence[tuple[Shards, int]], ranges: Int64s) -> tuple[Int64s, list[Any]]:
    """Return where ranges of unmapped shards are in memory, and what keeps them there; they are as `plan` takes them.

    StorageError or CheckFailed that names a file that fails.
    """
    addresses, memory = np.zeros(len(ranges), np.int64), list[Any]()
    sizes = np.bincount(ranges[:, 0], ranges[:, 2] - ranges[:, 1])
    remote = list[tuple[CachedShards, int, Bools]]()
    for slot in np.flatnonzero(sizes * MAPPED_PART >= shard_tokens.BLOCK_BYTES).tolist():
        of_store, number = shards[slot]
        if of_store.cached is not None:
            remote.append((of_store.cached, number, ranges[:, 0] == slot))
    for cache in {cached.cache for cached, _, _ in remote if not cached.cache.is_used}:
        of_cache = [read for read in remote if read[0].cache is cache]
        of_blocks = [cached.sizes_to_map(number, *ranges[inside, 1:].T) for cached, number, inside in of_cache]
        cache.check_step(np.concatenate(of_blocks))
    for cached, number, inside in remote:
        places = cached.mapped(number, *ranges[inside, 1:].T)
        if places:
            addresses[inside] = places[0]
            memory += places[1]
    is_read = addresses == 0
    if is_read.any():
        buffer, addresses[is_read] = _read(shards, ranges[is_read])
        memory.append(buffer)
    return addresses, memory


def _read(shards: Sequence[tuple[Shards, int]], ranges: Int64s) -> tuple[Bytes, Int64s]:
    """Return a buffer that holds ranges of shards' files, and the address of each."""
    runs, places = plan(ranges)
    buffer = np.empty(runs[-1, 2:].sum(), np.uint8)
    address = address_of(buffer)
    for group in _groups((*shards[number], *rest) for number, *rest in runs.tolist()):
        _read_files(group, address)
        for piece, _ in group:
            piece.file.let_go()
    return buffer, address + places


def plan(ranges: Int64s) -> tuple[Int64s, Int64s]:
    """Return the reads that fetch all ranges, sorted and joined, and the byte of the buffer at which each range begins.

    A range is a shard, its first byte and the byte after its last; a read a shard, its first byte, the bytes, and the
    byte of the buffer that they come to: arrays [ranges, 3] and [reads, 4].
    """
    keys = ranges[:, 0] << _FILE_BITS
    order = np.argsort(keys + ranges[:, 1], kind="stable")
    starts, stops = (keys + ranges[:, 1])[order], np.maximum.accumulate((keys + ranges[:, 2])[order])
    is_new = np.append(True, starts[1:] > stops[:-1] + MAX_GAP_BYTES)
    [begins] = np.nonzero(is_new)
    firsts = starts[begins]
    sizes = stops[np.append(begins[1:], len(stops)) - 1] - firsts
    targets = np.cumsum(sizes) - sizes
    places = np.empty_like(starts)
    places[order] = starts + (targets - firsts)[np.cumsum(is_new) - 1]
    return np.stack([firsts >> _FILE_BITS, firsts & (1 << _FILE_BITS) - 1, sizes, targets], axis=1), places


def _groups(runs: Iterable[tuple[Shards, int, int, int, int]]) -> Iterator[list[tuple[FilePiece, int]]]:
    """Yield pieces of files, each with its byte of the buffer: those of MAX_FILES files or fewer at a time."""
    group: list[tuple[FilePiece, int]] = []
    files, most = set[int](), min(MAX_FILES, OPEN_FILES.most)
    for shards, shard, start, size, place in runs:
        for piece in shards.file_pieces(shard, start, start + size):
            if len(files) == most and id(piece.file) not in files:
                yield group
                group, files = [], set[int]()
            files.add(id(piece.file))
            group.append((piece, place))
            place += piece.size
            if not piece.file.is_kept:  # so that it is open for a moment only
                yield group
                group, files = [], set[int]()
    if group:
        yield group


def _read_files(group: Sequence[tuple[FilePiece, int]], address: int) -> None:
    reads = np.array(
        [(piece.file.descriptor, piece.start, address + place, piece.size) for piece, place in group], READ
    )
    failed = np.zeros(1, np.int64)
    code = library().dk_read_files(address_of(reads), len(reads), MAX_THREADS, address_of(failed))
    if not code:
        return
    file, start, size = group[failed.item()][0]
    if code == -errno.ENODATA:
        raise CheckFailed(f"{file.path} ends before byte {start + size}", hint=f"ls -l {quoted(file.path)}")
    raise StorageError(f"cannot read {file.path}: {os.strerror(-code)}", hint=f"ls -l {quoted(file.path)}")
