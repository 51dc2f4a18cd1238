"""The log of a disk: what was written and flushed, and what a loss of power at some place of it leaves on the disk.

A flush covers the writes that were served before it. Of the others each block is kept or lost by itself, and of some
blocks each sector. A false disk acknowledges flushes and keeps no more for them.
"""

import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.power_loss.calls import ACKNOWLEDGED

BLOCK, SECTOR = 4096, 512
WRITE, FLUSH, SAID = 1, 2, 3
HEAD = struct.Struct("<BQI")
KEPT_SHARES = (0.0, 0.1, 0.5, 0.9)  # of the blocks that no flush covers, by cut
TORN_SHARE = 0.1  # of those blocks


def head(kind: int, offset: int = 0, size: int = 0) -> bytes:
    """Return what precedes the data of an entry."""
    return HEAD.pack(kind, offset, size)


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A write, a flush, or what was said meanwhile."""

    kind: int
    offset: int
    data: bytes


def read_log(path: Path) -> list[LogEntry]:
    """Return the entries of a log in their order."""
    content, entries, at = path.read_bytes(), list[LogEntry](), 0
    while at < len(content):
        kind, offset, size = HEAD.unpack_from(content, at)
        at += HEAD.size + size
        entries.append(LogEntry(kind, offset, content[at - size : at]))
    return entries


@dataclass(frozen=True)
class BlockLog:
    """What a disk did from its first write on; `begin` and `end` are the places between which power may be lost."""

    entries: Sequence[LogEntry]
    begin: int
    end: int

    def promises(self, place: int) -> tuple[str, ...]:
        """Return what was promised before a place."""
        said = b"".join(entry.data for entry in self.entries[self.begin : place] if entry.kind == SAID)
        lines = said.split(b"\n")
        return tuple(line.removeprefix(ACKNOWLEDGED).decode() for line in lines if line.startswith(ACKNOWLEDGED))

    def writes(self, begin: int, end: int) -> Iterator[LogEntry]:
        """Return the writes between two places."""
        return (entry for entry in self.entries[begin:end] if entry.kind == WRITE)

    def sure(self, place: int) -> int:
        """Return the place of the last flush before another: what was written before it is kept."""
        return next((number for number in range(place - 1, -1, -1) if self.entries[number].kind == FLUSH), 0)

    def survivors(self, since: int, place: int, rng: random.Random) -> Iterator[tuple[int, bytes]]:
        """Draw what is kept of the writes between two places: offsets and data in the order of the writes."""
        kept_share = rng.choice(KEPT_SHARES)
        for entry in self.writes(since, place):
            for offset, block in pieces(entry.offset, entry.data, BLOCK):
                if rng.random() < TORN_SHARE:
                    yield from (sector for sector in pieces(offset, block, SECTOR) if rng.random() < 0.5)
                elif rng.random() < kept_share:
                    yield offset, block


def pieces(offset: int, data: bytes, size: int) -> Iterator[tuple[int, bytes]]:
    """Cut what is written at an offset where a disk has its blocks: 10 bytes at 4090 are 6 and 4."""
    at = offset
    while at < offset + len(data):
        end = min((at // size + 1) * size, offset + len(data))
        yield at, data[at - offset : end - offset]
        at = end
