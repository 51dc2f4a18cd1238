"""The tokens of a shard behind a URL, in blocks of about a MiB that are checked one by one.

A store that is not compressed has no checksums of parts of a file. It has one of each document, in the shard's
`.origin`: so a block is whole documents. If stretches of a shard are known to be read together, blocks end where these
do, and a document that two of them share is a block by itself. A stretch of 8 MiB is then fetched as 8 MiB, and not as
the 9 blocks that it touches. An archive's block is a frame. A block whose check fails is read once more on a new
connection, as bits also flip on the way.

Of either kind block k is bytes [bounds[k], bounds[k + 1]) of a shard's tokens, and `edges` are the bounds as an array.
`content` names all the tokens. Both are safe to use from several threads.
"""

import threading
from collections.abc import Callable
from itertools import pairwise

import numpy as np

from datakit.files.durable import FileDigest
from datakit.format.origins import Origins
from datakit.format.shard import Int64s, ShardIndex, damaged
from datakit.shards.store_source import SourceFile, StoreSource
from threefold.errors import CheckFailed, quoted
from threefold.storage import Buffer

BLOCK_BYTES = 1 << 20
NO_STRETCHES: Int64s = np.empty(0, np.int64)
_threads = threading.local()


class PlainTokens:
    """Blocks of whole documents."""

    def __init__(
        self,
        source: StoreSource,
        file: SourceFile,
        open_others: Callable[[], tuple[ShardIndex, Origins]],
        stretches: Int64s = NO_STRETCHES,
    ) -> None:
        """Take the file of the tokens, what opens the shard's other two, and the bytes inside at which stretches begin.

        CheckFailed if its documents do not make up the tokens.
        """
        self._source, self._file, self._open_others = source, file, open_others
        self.content = content_name(file.digest)
        index, _ = open_others()
        size_bytes = file.digest.size_bytes
        ends = index.pointers + index.lengths.astype(np.int64) * index.dtype.itemsize
        if len(ends) and (index.pointers[0] or ends[-1] != size_bytes or (ends[:-1] != index.pointers[1:]).any()):
            raise damaged(f"{index.path} is damaged: its documents do not follow each other up to byte {size_bytes}")
        firsts = _first_documents(index.pointers, size_bytes, stretches)
        self._firsts: list[int] = [*firsts.tolist(), len(ends)]
        self.bounds: list[int] = [*index.pointers[firsts].tolist(), size_bytes]
        self.edges = np.array(self.bounds, np.int64)

    def fetch(self, first: int, stop: int) -> list[Buffer]:
        """Return the bytes of the blocks [first, stop), in one request; CheckFailed names the object if damaged."""
        begin, end = self.bounds[first], self.bounds[stop]
        first_document, last = self._firsts[first], self._firsts[stop]
        index, origins = self._open_others()
        sizes: list[int] = (index.lengths[first_document:last].astype(np.int64) * index.dtype.itemsize).tolist()
        content = self._source.checked(
            self._file, lambda source: self._checked(source, begin, end, first_document, sizes, origins)
        )
        return [content[start - begin : after - begin] for start, after in pairwise(self.bounds[first : stop + 1])]

    def _checked(
        self, source: StoreSource, start: int, stop: int, first: int, sizes: list[int], origins: Origins
    ) -> memoryview:
        content = source.read_plain(self._file, start, stop)
        number = origins.first_damaged(first, content, sizes)
        if number is not None:
            raise CheckFailed(
                f"{self._source.place_of(self._file)} is damaged: the checksum of document {number} of it does not "
                f"hold, in bytes {start} to {stop}",
                hint=f"datakit verify {quoted(self._source.storage.url)}",
            )
        return content


class ArchivedTokens:
    """Blocks that are the frames of an archive's file."""

    def __init__(self, source: StoreSource, file: SourceFile) -> None:
        """Read the table of frames; CheckFailed if the file is not of the recorded sizes."""
        self._source, self._file = source, file
        self._reader = source.checked(file, lambda source: source.open_packed(file))
        self.content, self.bounds = content_name(file.digest), self._reader.bounds
        self.edges = np.array(self.bounds, np.int64)

    def fetch(self, first: int, stop: int) -> list[Buffer]:
        """Return the content of the frames [first, stop), in memory that this thread's next call uses again."""
        return self._source.checked(self._file, lambda source: self._unpacked(source, first, stop))

    def _unpacked(self, source: StoreSource, first: int, stop: int) -> list[Buffer]:
        reader = self._reader if source.storage is self._source.storage else source.open_packed(self._file)
        memory, found = _own_memory(self.bounds[stop] - self.bounds[first]), list[Buffer]()
        for number, packed in reader.packed_frames(first, stop, at_once=True):
            found.append(reader.unpack_into(memory, number, packed))
            memory = memory[len(found[-1]) :]
        return found


ShardTokens = PlainTokens | ArchivedTokens


def _first_documents(starts: Int64s, size_bytes: int, stretches: Int64s) -> Int64s:
    """Return the first document of each block, of documents that begin at some bytes and follow each other to the last.

    With documents at bytes 0, 40, 90, 160 and 230 of 280, blocks of 100 bytes and a stretch that begins at byte 120,
    which is in the one at 90, these are 0, 2 and 3.
    """
    cut = np.searchsorted(starts, stretches, side="right") - 1
    parts = distinct(np.concatenate([np.zeros(min(1, len(starts)), np.int64), cut, cut + 1]))
    begins = starts[parts[parts < len(starts)]]
    sizes = np.diff(begins, append=size_bytes)
    counts = np.maximum(1, np.rint(sizes / BLOCK_BYTES).astype(np.int64))
    numbers = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    places = np.repeat(begins, counts) + numbers * np.repeat(sizes, counts) // np.repeat(counts, counts)
    firsts = distinct(np.searchsorted(starts, places))
    return firsts[firsts < len(starts)]


def _own_memory(size_bytes: int) -> memoryview:
    """Return memory that this thread has, of so many bytes or more."""
    memory = getattr(_threads, "memory", memoryview(b""))
    if len(memory) < size_bytes:
        memory = _threads.memory = np.empty(size_bytes, np.uint8).data
    return memory


def content_name(digest: FileDigest) -> str:
    """Return what names a file's content in the cache."""
    return f"{digest.xxh3_64}-{digest.size_bytes}"


def distinct(numbers: Int64s) -> Int64s:
    """Return the different numbers, sorted; np.unique imports masked arrays at its first use, which takes 30 ms."""
    found: Int64s = np.sort(numbers)
    return np.compress(np.append(True, found[1:] != found[:-1])[: len(found)], found)
