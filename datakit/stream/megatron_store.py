"""MegatronStore: a token store whose rows are those of megatron-core's GPTDataset, in the order in which it reads them.

Documents are repeated and shuffled, and row r is tokens [rL, rL + L] of them one after the other. Of that order there
are 4 bytes a document and epoch, and of the shuffle of rows 4 bytes a row. Where a row begins is found by search: each
eighth document's first token is known. Opening is O(shards); the order is made at first use (csrc/datakit, one pass).
"""

from array import array
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from datakit.format.shard import HEADER, Int64s
from datakit.store.token_store import TokenStore
from datakit.stream.megatron_order import MAX_ROWS, Epochs, MegatronOrder
from datakit.stream.native import megatron_library
from threefold.errors import UserError

_STRIDE = 8
_MAX_DOCUMENTS = 2**31 - 1
Int32s = npt.NDArray[np.int32]
UInt32s = npt.NDArray[np.uint32]


class MegatronStore(TokenStore):
    """A store under one order; documents, origins and tokens are the store's."""

    seed: int
    documents_read: tuple[int, int]  # [begin, end)
    num_tokens_read: int
    epochs: Epochs

    @classmethod
    def of(
        cls, store: TokenStore, order: MegatronOrder, num_samples: int | None, *, seq_length: int, seed: int
    ) -> "MegatronStore":
        """Return an open store with its rows for so many samples, or one epoch's; UserError if they cannot be made."""
        if store.packing != "concat":
            raise UserError(f"{store.path} is packed by {store.packing}, and the order of Megatron cuts rows itself")
        found = cls(store.path, store.manifest, store.reading)
        found.seed, found.documents_read = seed, order.documents(store.num_documents)
        begin, end = (
            store.first_token(number) if number < store.num_documents else store.num_tokens
            for number in found.documents_read
        )
        found.num_tokens_read = end - begin
        if end - begin < seq_length + 1:
            raise UserError(
                f"{store.path} holds {end - begin} tokens for {order.part}, too few for one row of {seq_length} + 1",
                hint=f"--seq-length {max(1, end - begin - 1)}, or another data.split",
            )
        found.epochs = Epochs.of(end - begin, seq_length, num_samples)
        if found.epochs.num_rows > MAX_ROWS or store.num_documents > _MAX_DOCUMENTS:
            raise UserError(
                f"{store.path} has {store.num_documents} documents and {found.epochs.num_rows} rows, and the order of "
                f"Megatron is known for at most {_MAX_DOCUMENTS} and {MAX_ROWS}",
                hint="datakit preprocess writes several stores, or fewer train_samples",
            )
        return found

    def num_rows(self, seq_length: int) -> int:
        """Return the rows of all epochs together."""
        return self.epochs.num_rows

    @property
    def rows(self) -> UInt32s:
        """The rows in the order in which they are read."""
        return self._order[2]

    def row_spans(self, row: int, seq_length: int) -> list[tuple[int, int]]:
        """Return the token addresses [start, stop) that a row reads, in the order of its tokens."""
        order, starts, _ = self._order
        start, stop = row * seq_length, (row + 1) * seq_length + 1
        block = int(np.searchsorted(starts, start, "right")) - 1
        at, place, found = int(starts[block]), block * _STRIDE, list[tuple[int, int]]()
        while at < stop:
            for document in order[place : place + 2 * _STRIDE].tolist():
                address, length = self._place(document)
                low, high = max(start - at, 0), min(stop - at, length)
                if low < high:
                    found.append((address + low, address + high))
                at += length
            place += 2 * _STRIDE
        return found

    def rows_of(self, document: int, seq_length: int) -> Int64s:
        """Return the rows that read tokens of a document, in rising order."""
        order, starts, _ = self._order
        size = len(self.document(document))
        found: set[int] = set()
        for place in np.flatnonzero(order == document).tolist() if size else ():
            block = place // _STRIDE
            begin = int(starts[block]) + sum(self._place(each)[1] for each in order[block * _STRIDE : place].tolist())
            last = min((begin + size - 1) // seq_length, self.epochs.num_rows - 1)
            found.update(range(max(0, -(-begin // seq_length) - 1), last + 1))
        return np.array(sorted(found), np.int64)

    def _place(self, document: int) -> tuple[int, int]:
        """Return the token address and the length of a document."""
        number, first = self._locate_document(document)
        shard = self.shard(number)
        pointer, length = shard.index.pointers[document - first], shard.index.lengths[document - first]
        return self.token_starts[number] + int(pointer) // shard.dtype.itemsize, int(length)

    @cached_property
    def _order(self) -> tuple[Int32s, Int64s, UInt32s]:
        """The documents in their order, the first token of each eighth and the end, and the rows in their order."""
        epochs, (begin, end) = self.epochs, self.documents_read
        state = np.random.RandomState(self.seed).get_state(legacy=False)["state"]
        twister = array("I", (*state["key"].tolist(), state["pos"]))
        documents = np.empty((epochs.num_epochs, end - begin), np.int32)
        documents[:] = np.arange(begin, end, dtype=np.int32)
        order = documents.reshape(-1)
        _shuffle(twister, order, epochs.together_epochs * (end - begin))
        starts = self._starts(order)
        rows = np.arange(epochs.num_rows, dtype=np.uint32)
        _shuffle(twister, rows, epochs.together_rows)
        return order, starts, rows

    def _starts(self, order: Int32s) -> Int64s:
        """Return the tokens before each eighth place of the order, and those of all; CheckFailed if they do not add up.

        Lengths are read past the mapped index, whose pages would stay in memory.
        """
        begin, end = self.documents_read
        lengths = np.empty(end - begin, np.int32)
        for number, (first, stop) in enumerate(pairwise(self.document_starts)):
            low, high = max(first, begin), min(stop, end)
            if low < high:
                offset_bytes = HEADER.size + 4 * (low - first)
                path = self.shard(number).idx_path
                lengths[low - begin : high - begin] = np.fromfile(path, "<i4", high - low, offset=offset_bytes)
        starts = np.empty(-(-len(order) // _STRIDE) + 1, np.int64)
        total = megatron_library().dk_token_starts(
            order.ctypes.data, len(order), lengths.ctypes.data, begin, _STRIDE, starts.ctypes.data
        )
        if lengths.min() < 0 or total != self.epochs.num_epochs * self.num_tokens_read:
            raise self._damaged(
                f"{self.path} is damaged: documents {begin} to {end} have {total // self.epochs.num_epochs} tokens by "
                f"their lengths, {self.num_tokens_read} by their places"
            )
        return starts


def _shuffle(twister: "array[int]", values: npt.NDArray[np.int32] | UInt32s, apart: int) -> None:
    """Shuffle the first `apart` values in place, and the others after them, as RandomState.shuffle does."""
    for part in (values[:apart], values[apart:]):
        if len(part):
            megatron_library().dk_shuffle(twister.buffer_info()[0], part.ctypes.data, len(part))
