"""ShardEntry: a shard as a manifest lists it; ScannedShards: a long list of them, read natively.

A manifest of 15,000 shards has 6 MB of JSON. Parsed, checked and made objects it takes 180 ms; scanned by
csrc/datakit/manifest.cpp 10 ms, and an entry is made once it is asked for. Only the layout that `Manifest.encode`
writes is scanned; any other text, and so any fault in it, is left to the parser.
"""

import os
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from datakit.files.durable import FileDigest
from datakit.format.native import library
from datakit.format.shard import Int64s

_HEAD = b'\n  "shards": '
_MIN_BYTES = 256  # of an entry's text
_COLUMNS = 11  # of dk_shard, all int64
_DOCUMENTS, _TOKENS, _BIN_BYTES = 2, 3, 5
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One shard: its name without suffix, counts, and the digests of its files."""

    name: str
    num_documents: int
    num_tokens: int
    first_line: int
    bin: FileDigest
    idx: FileDigest
    origin: FileDigest

    def files(self) -> dict[str, FileDigest]:
        """Return the digests of its files by name."""
        return {f"{self.name}.bin": self.bin, f"{self.name}.idx": self.idx, f"{self.name}.origin": self.origin}


class ScannedShards(Sequence[ShardEntry]):
    """The shards of a manifest's text.

    `sorted_json` is their list as compact JSON with sorted keys, `content_json` that of their token counts and
    checksums; both are what a manifest's checksum and fingerprint are made of.
    """

    def __init__(self, text: bytes, table: Int64s, sorted_json: memoryview, content_json: memoryview) -> None:
        self._text, self._table = text, table
        self.sorted_json, self.content_json = sorted_json, content_json

    @classmethod
    def scan(cls, text: bytes) -> tuple["ScannedShards", bytes] | None:
        """Return the shards of a manifest and its text with an empty list of them; None if it is laid out otherwise."""
        start, num_bytes = text.find(_HEAD) + len(_HEAD), len(text)
        most = num_bytes // _MIN_BYTES + 1
        table, lengths = np.empty((most, _COLUMNS), np.int64), array("q", bytes(24))
        buffers = [np.empty(num_bytes, np.uint8) for _ in range(2)]
        count = -1
        if start >= len(_HEAD):
            count = library().dk_scan_shards(
                text, start, num_bytes, most, table.ctypes.data, *(buffer.ctypes.data for buffer in buffers),
                lengths.buffer_info()[0],
            )  # fmt: skip
        if count < 0:
            return None
        views = (buffer[:size].data for buffer, size in zip(buffers, lengths))
        return cls(text, table[:count].copy(), *views), text[:start] + b"[]" + text[lengths[2] :]

    @property
    def num_documents(self) -> list[int]:
        """Documents of each shard."""
        return list(self._table[:, _DOCUMENTS].tolist())

    @property
    def num_tokens(self) -> list[int]:
        """Tokens of each shard."""
        return list(self._table[:, _TOKENS].tolist())

    def first_unequal(self, itemsize: int) -> ShardEntry | None:
        """Return the first shard whose tokens have other bytes than their number says."""
        unequal = self._table[:, _BIN_BYTES] != self._table[:, _TOKENS] * itemsize
        return self[int(unequal.argmax())] if unequal.any() else None

    def misfits(self, folder: str) -> Iterable[ShardEntry]:
        """Return the first shard in a folder with a file that has not its size, if there is one, or all to look at."""
        number = library().dk_find_misfit(os.fsencode(folder), self._text, self._table.ctypes.data, len(self))
        return self if number < 0 else self[number : number + 1]

    def __len__(self) -> int:
        return len(self._table)

    @overload
    def __getitem__(self, number: int) -> ShardEntry: ...
    @overload
    def __getitem__(self, number: slice) -> tuple[ShardEntry, ...]: ...
    def __getitem__(self, number: int | slice) -> ShardEntry | tuple[ShardEntry, ...]:
        if isinstance(number, slice):
            return tuple(self[shard] for shard in range(*number.indices(len(self))))
        at, size, documents, tokens, first_line, *files = self._table[number].tolist()
        digests = [
            FileDigest(size_bytes, self._at(place, _DIGEST_BYTES)) for size_bytes, place in zip(files, files[3:])
        ]
        return ShardEntry(self._at(at, size), documents, tokens, first_line, *digests)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def _at(self, place: int, size: int) -> str:
        return self._text[place : place + size].decode()
