"""Staging: the tokens of a batch's spans that are not mapped, read into one buffer in as few requests as may be.

Spans are sorted by shard and place; those that overlap or nearly touch are one read. All reads of up to 64 files are
one call of csrc/datakit/reads.cpp, without the GIL, on several threads. Two spans of 8 KiB at bytes 0 and 12,288 of a
shard are one read of 20,480 bytes, and begin at bytes 0 and 12,288 of the buffer.
"""

import errno
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from datakit.store.shard_file import OPEN_FILES, FilePiece
from datakit.store.token_store import TokenStore
from datakit.stream.batch import Bytes
from datakit.stream.native import address_of, stream_library
from threefold.errors import CheckFailed, StorageError

MAX_GAP_BYTES = 16 << 10  # is read along, as a further request would cost more
MAX_FILES = 64  # open at once for one batch
MAX_THREADS = 16


class UnmappedShard(NamedTuple):
    """A shard of a store whose files are read; the bytes of a token are as in its manifest."""

    store: TokenStore
    number: int
    itemsize: int

    def wanted(self, first: int, num_tokens: int) -> "Wanted":
        """Return the bytes of tokens of the shard."""
        return Wanted(self, first * self.itemsize, (first + num_tokens) * self.itemsize)


class Wanted(NamedTuple):
    """Bytes [start, stop) of a shard."""

    shard: UnmappedShard
    start: int
    stop: int


class Run(NamedTuple):
    """What one read fetches: bytes [start, stop) of a shard, to byte `place` of the buffer."""

    shard: UnmappedShard
    start: int
    stop: int
    place: int


def plan(wanted: Sequence[Wanted]) -> tuple[list[Run], list[int]]:
    """Return the reads that fetch all ranges, sorted and joined, and the byte of the buffer at which each begins."""
    order = sorted(range(len(wanted)), key=lambda number: _place(wanted[number]))
    runs: list[Run] = []
    places, end = [0] * len(wanted), 0
    for number in order:
        shard, start, stop = wanted[number]
        last = runs[-1] if runs else None
        if last and last.shard[:2] == shard[:2] and start <= last.stop + MAX_GAP_BYTES:
            runs[-1] = last = last._replace(stop=max(last.stop, stop))
        else:
            last = Run(shard, start, stop, end)
            runs.append(last)
        places[number] = last.place + start - last.start
        end = last.place + last.stop - last.start
    return runs, places


def stage(wanted: Mapping[int, Wanted]) -> tuple[Bytes | None, dict[int, int]]:
    """Return memory that holds all ranges, and the address of each by its key; None without any.

    StorageError or CheckFailed that names a file that fails.
    """
    if not wanted:
        return None, {}
    runs, places = plan(list(wanted.values()))
    last = runs[-1]
    buffer = np.empty(last.place + last.stop - last.start, np.uint8)
    address = address_of(buffer)
    for group in _groups(runs):
        _read(group, address)
    return buffer, {key: address + place for key, place in zip(wanted, places)}


def _place(wanted: Wanted) -> tuple[int, int, int, int]:
    return id(wanted.shard.store), wanted.shard.number, wanted.start, wanted.stop


def _groups(runs: Iterable[Run]) -> Iterator[list[tuple[FilePiece, int]]]:
    """Yield pieces of files, each with its byte of the buffer: those of MAX_FILES files or fewer at a time."""
    group: list[tuple[FilePiece, int]] = []
    files, most = set[int](), min(MAX_FILES, OPEN_FILES.most)
    for shard, start, stop, place in runs:
        for piece in shard.store.file_pieces(shard.number, start, stop):
            if len(files) == most and id(piece.file) not in files:
                yield group
                group, files = [], set[int]()
            files.add(id(piece.file))
            group.append((piece, place))
            place += piece.size
    yield group


def _read(group: Sequence[tuple[FilePiece, int]], address: int) -> None:
    table, failed = array("q"), array("q", [0])
    for piece, place in group:
        table.extend((piece.file.descriptor, piece.start, address + place, piece.size))
    code = stream_library().dk_read_files(table.buffer_info()[0], len(group), MAX_THREADS, failed.buffer_info()[0])
    if not code:
        return
    file, start, size = group[failed[0]][0]
    if code == -errno.ENODATA:
        raise CheckFailed(f"{file.path} ends before byte {start + size}", hint=f"ls -l {file.path}")
    raise StorageError(f"cannot read {file.path}: {os.strerror(-code)}", hint=f"ls -l {file.path}")
