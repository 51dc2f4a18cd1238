"""MegatronRows: the rows of megatron-core's GPTDataset, in the order in which it reads them.

Documents are repeated and shuffled, and row r is tokens [rL, rL + L] of them one after the other. Of that order there
are 4 bytes a document and epoch, and of the shuffle of rows 4 bytes a row. Where a row begins is found by search: each
eighth document's first token is known. Opening is O(shards); the order is made at first use (csrc/datakit, one pass),
of the places of all documents: those of a store behind a URL become a column of its cache, 12 bytes a document.
"""

from array import array
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from datakit.format.native import library
from datakit.format.shard import Int64s
from datakit.rows.megatron_order import MAX_ROWS, MegatronOrder, Repeats
from datakit.shards.document_places import DocumentPlaces, IndexedPlaces, Int32s
from datakit.shards.shards import Shards
from datakit.store.rows import Piece
from threefold.errors import UserError

_STRIDE = 8
_MAX_DOCUMENTS = 2**31 - 1
UInt32s = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class MegatronChoice:
    """The rows of a store under an order for so many samples of it, or one epoch's."""

    order: MegatronOrder
    num_samples: int | None
    seq_length: int
    seed: int

    def bound(self, shards: Shards) -> "MegatronRows":
        """Return the rows; UserError if they cannot be made."""
        return MegatronRows(shards, self)


class MegatronRows:
    """A store's rows under one order; safe to read from several threads."""

    packing, place, fingerprint, is_contiguous = "concat", "", "", False

    def __init__(self, shards: Shards, choice: MegatronChoice) -> None:
        """Take a store's shards; UserError if they have no row, or more of something than the order is known for."""
        self._shards, self.choice = shards, choice
        order, num_documents = choice.order, shards.document_starts[-1]
        self.documents_read = order.documents(num_documents)  # [begin, end)
        places = IndexedPlaces(shards.shard, shards.token_starts, shards.document_starts)
        begin, end = (
            places.place(number)[0] if 0 < number < num_documents else shards.token_starts[-1] * (number > 0)
            for number in self.documents_read
        )
        if not 0 <= begin <= end <= shards.token_starts[-1]:
            raise shards.damaged(f"{shards.place} is damaged: a document begins at token {begin}, a later one at {end}")
        self.num_tokens_read = end - begin
        if end - begin < choice.seq_length + 1:
            raise UserError(
                f"{shards.place} holds {end - begin} tokens for {order.part}, too few for one row of "
                f"{choice.seq_length} + 1",
                hint=f"--seq-length {max(1, end - begin - 1)}, or another data.split",
            )
        self.epochs = Repeats.of(end - begin, choice.seq_length, choice.num_samples)
        if self.epochs.num_rows > MAX_ROWS or num_documents > _MAX_DOCUMENTS:
            raise UserError(
                f"{shards.place} has {num_documents} documents and {self.epochs.num_rows} rows, and the order of "
                f"Megatron is known for at most {_MAX_DOCUMENTS} and {MAX_ROWS}",
                hint="datakit preprocess writes several stores, or fewer train_samples",
            )

    def bound(self, shards: Shards) -> "MegatronRows":
        """Return these rows."""
        return self

    def of_length(self, seq_length: int) -> MegatronChoice | None:
        """Return None: an order has rows of one length."""
        return None

    def num_rows(self, seq_length: int) -> int:
        """Return the rows of all epochs together."""
        return self.epochs.num_rows

    @property
    def row_order(self) -> UInt32s:
        """The rows in the order in which they are read."""
        return self._order[2]

    def pieces(self, row: int, seq_length: int) -> list[Piece]:
        """Return the pieces of documents that a row reads, the label of its last token included."""
        order, starts, _ = self._order
        start, stop = row * seq_length, (row + 1) * seq_length + 1
        block = int(np.searchsorted(starts, start, "right")) - 1
        at, place, pieces = int(starts[block]), block * _STRIDE, list[Piece]()
        while at < stop:
            for document in order[place : place + 2 * _STRIDE].tolist():
                address, length = self._places.place(document)
                low, high = max(start - at, 0), min(stop - at, length)
                if low < high:
                    pieces.append(Piece(address + low, high - low, goes_on=False))
                at += length
            place += 2 * _STRIDE
        return pieces

    def rows_of(self, document: int, tokens: range, seq_length: int) -> Int64s:
        """Return the rows that read tokens of a document, in rising order."""
        order, starts, _ = self._order
        size = len(tokens)
        rows: set[int] = set()
        for place in np.flatnonzero(order == document).tolist() if size else ():
            block = place // _STRIDE
            before = order[block * _STRIDE : place].tolist()
            begin = int(starts[block]) + sum(self._places.place(other)[1] for other in before)
            last = min((begin + size - 1) // seq_length, self.epochs.num_rows - 1)
            rows.update(range(max(0, -(-begin // seq_length) - 1), last + 1))
        return np.array(sorted(rows), np.int64)

    @cached_property
    def _places(self) -> DocumentPlaces:
        return self._shards.document_places()

    @cached_property
    def _order(self) -> tuple[Int32s, Int64s, UInt32s]:
        """The documents in their order, the first token of each eighth and the end, and the rows in their order."""
        epochs, (begin, end) = self.epochs, self.documents_read
        state = np.random.RandomState(self.choice.seed).get_state(legacy=False)["state"]
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
        """Return the tokens before each eighth place of the order, and those of all; CheckFailed if they do not fit."""
        begin, end = self.documents_read
        lengths = self._places.lengths(begin, end)
        starts = np.empty(-(-len(order) // _STRIDE) + 1, np.int64)
        total = library().dk_token_starts(
            order.ctypes.data, len(order), lengths.ctypes.data, begin, _STRIDE, starts.ctypes.data
        )
        if lengths.min() < 0 or total != self.epochs.num_epochs * self.num_tokens_read:
            raise self._shards.damaged(
                f"{self._shards.place} is damaged: documents {begin} to {end} have "
                f"{total // self.epochs.num_epochs} tokens by their lengths, {self.num_tokens_read} by their places"
            )
        return starts


def _shuffle(twister: "array[int]", values: npt.NDArray[np.int32] | UInt32s, apart: int) -> None:
    """Shuffle the first `apart` values in place, and the others after them, as RandomState.shuffle does."""
    for part in (values[:apart], values[apart:]):
        if len(part):
            library().dk_shuffle(twister.buffer_info()[0], part.ctypes.data, len(part))
