"""Where each document of a store begins and how long it is, for who reads documents of all shards in any order.

A folder's indices are mapped, and read where they are. Those behind a URL would be opened again and again: their
lengths and addresses become one column of the cache, 12 bytes a document. With documents of 3, 1 and 2 tokens these are
lengths 3, 1, 2 and addresses 0, 3, 4.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from datakit.format.shard import HEADER, TokenShard

Int32s = npt.NDArray[np.int32]
BYTES_A_DOCUMENT = 12  # of a column
_NUM_OPENERS = 8  # threads that open shards for one


class IndexedPlaces:
    """The documents of a store by their numbers, in mapped indices; safe to read from several threads."""

    def __init__(
        self, shard: Callable[[int], TokenShard], token_starts: Sequence[int], document_starts: Sequence[int]
    ) -> None:
        """Take what opens a shard, and where the tokens and documents of each begin."""
        self._shard, self._tokens, self._documents = shard, token_starts, document_starts

    def lengths(self, begin: int, end: int) -> Int32s:
        """Return the tokens of each document [begin, end), read past the mapped indices: their pages would stay."""
        lengths = np.empty(end - begin, np.int32)
        for number, (first, stop) in enumerate(pairwise(self._documents)):
            low, high = max(first, begin), min(stop, end)
            if low < high:
                offset_bytes = HEADER.size + 4 * (low - first)
                lengths[low - begin : high - begin] = np.fromfile(
                    self._shard(number).idx_path, "<i4", high - low, offset=offset_bytes
                )
        return lengths

    def place(self, document: int) -> tuple[int, int]:
        """Return the address of a document's first token in the store, and its length."""
        number = bisect_right(self._documents, document) - 1
        shard, inside = self._shard(number), document - self._documents[number]
        start = int(shard.index.pointers[inside]) // shard.dtype.itemsize
        return self._tokens[number] + start, int(shard.index.lengths[inside])


class ColumnPlaces:
    """Those of a column: the addresses of all documents, 8 bytes each, and after them the lengths, 4 bytes each."""

    def __init__(self, column: npt.NDArray[np.uint8]) -> None:
        """Take the bytes of a column, as `encode_places` returns them."""
        count = len(column) // BYTES_A_DOCUMENT
        self.column = column  # keeps a mapping
        self.addresses, self.all_lengths = column[: 8 * count].view("<i8"), column[8 * count :].view("<i4")

    def lengths(self, begin: int, end: int) -> Int32s:
        """Return the lengths of documents."""
        return self.all_lengths[begin:end].astype(np.int32)

    def place(self, document: int) -> tuple[int, int]:
        """Return the address of a document, and its length."""
        return int(self.addresses[document]), int(self.all_lengths[document])


DocumentPlaces = IndexedPlaces | ColumnPlaces


def encode_places(
    open_shard: Callable[[int], TokenShard], token_starts: Sequence[int], document_starts: Sequence[int]
) -> memoryview:
    """Return the column of all documents of shards, which begin at these tokens and documents; some open at a time."""
    places = ColumnPlaces(np.empty(BYTES_A_DOCUMENT * document_starts[-1], np.uint8))

    def put(number: int) -> None:
        shard = open_shard(number)
        inside = slice(*document_starts[number : number + 2])
        places.addresses[inside] = shard.index.pointers // shard.dtype.itemsize + token_starts[number]
        places.all_lengths[inside] = shard.index.lengths

    with ThreadPoolExecutor(_NUM_OPENERS) as pool:
        list(pool.map(put, range(len(document_starts) - 1)))
    return places.column.data
