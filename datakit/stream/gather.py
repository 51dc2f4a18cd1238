"""The batch gather: rows of L + 1 tokens, in pieces of mapped shards, become tokens, labels, positions and loss mask.

The native form (csrc/datakit/gather.cpp) reads every source token once, without the GIL, on several threads;
`gather_reference` is the same in numpy.
"""

import ctypes
from functools import cache

import numpy as np

from datakit.shard import Int64s, Tokens, TokenShard
from datakit.store import TokenStore
from datakit.stream.batch import HostBatch
from threefold.native import load_library

NO_EOD = -1
MAX_THREADS = 4
_TOKENS_A_THREAD = 1 << 18  # below this a further thread costs more than it brings


class Pieces:
    """Where the rows of a batch lie in mapped shards; holds the shards while the batch is made."""

    def __init__(self, num_rows: int, seq_length: int) -> None:
        self.seq_length = seq_length
        self.eod_ids = np.full(num_rows, NO_EOD, np.int64)
        self.shards: list[TokenShard] = []
        self._columns: list[tuple[Int64s, Int64s, Int64s, Int64s]] = []

    @property
    def num_rows(self) -> int:
        """Rows of the batch."""
        return len(self.eod_ids)

    def add(self, store: TokenStore, rows: Int64s, starts: Int64s) -> None:
        """Let each of these rows begin at a token address of the store."""
        self.eod_ids[rows] = NO_EOD if store.eod_id is None else store.eod_id
        remaining = np.full(len(rows), self.seq_length + 1, np.int64)
        while len(rows):
            shards = np.searchsorted(store.token_starts, starts, side="right") - 1
            different, sources = np.unique(shards, return_inverse=True)
            sources += len(self.shards)
            self.shards += [store.shard(int(shard)) for shard in different]
            counts = np.minimum(store.token_starts[shards + 1] - starts, remaining)
            self._columns.append((rows, sources, starts - store.token_starts[shards], counts))
            left = counts < remaining  # the rest of these rows lies in a next shard
            rows, starts, remaining = rows[left], (starts + counts)[left], (remaining - counts)[left]

    def table(self) -> Int64s:
        """[pieces, 4]: row, index into `shards`, first token there, tokens; sorted by row, then by place in it."""
        table = np.stack([np.concatenate(column) for column in zip(*self._columns)], axis=1)
        return table[np.argsort(table[:, 0], kind="stable")]


def gather(pieces: Pieces, *, mask_eod_loss: bool = False, reset_positions: bool = False) -> HostBatch:
    """Make a batch [rows, seq_length].

    `mask_eod_loss` takes the loss off the positions whose token is an end of document (they would predict the next,
    unrelated document); `reset_positions` counts positions from 0 again after each of them.
    """
    batch = HostBatch.allocate(pieces.num_rows, pieces.seq_length)
    table = pieces.table()
    addresses = np.array([shard.address for shard in pieces.shards], np.int64)
    itemsizes = np.array([shard.dtype.itemsize for shard in pieces.shards], np.int64)
    native = np.empty((len(table), 4), np.int64)  # row, address, tokens, bytes a token
    native[:, 0], native[:, 2], native[:, 3] = table[:, 0], table[:, 3], itemsizes[table[:, 1]]
    native[:, 1] = addresses[table[:, 1]] + table[:, 2] * native[:, 3]
    num_threads = max(1, min(MAX_THREADS, batch.tokens.size // _TOKENS_A_THREAD))
    code = _library().dk_gather(
        native.ctypes.data, len(native), pieces.num_rows, pieces.seq_length, pieces.eod_ids.ctypes.data,
        mask_eod_loss, reset_positions, batch.tokens.ctypes.data, batch.labels.ctypes.data,
        batch.positions.ctypes.data, batch.loss_mask.ctypes.data, num_threads,
    )  # fmt: skip
    assert code == 0, "the pieces of every row sum to seq_length + 1 tokens of 2 or 4 bytes"
    return batch


def gather_reference(pieces: Pieces, *, mask_eod_loss: bool = False, reset_positions: bool = False) -> HostBatch:
    """What `gather` does, in numpy."""
    batch = HostBatch.allocate(pieces.num_rows, pieces.seq_length)
    rows: list[list[Tokens]] = [[] for _ in range(pieces.num_rows)]
    for row, source, start, count in pieces.table().tolist():
        rows[row].append(pieces.shards[source].tokens[start : start + count])
    for row, parts in enumerate(rows):
        tokens = np.concatenate(parts).astype(np.int64)
        batch.tokens[row], batch.labels[row] = tokens[:-1], tokens[1:]
    is_eod = (batch.tokens == pieces.eod_ids[:, None]) & (pieces.eod_ids[:, None] != NO_EOD)
    batch.loss_mask[:] = ~is_eod if mask_eod_loss else 1
    positions = np.arange(pieces.seq_length)
    batch.positions[:] = positions
    if reset_positions:
        after_eod = np.zeros_like(is_eod)
        after_eod[:, 1:] = is_eod[:, :-1]
        batch.positions[:] -= np.maximum.accumulate(np.where(after_eod, positions, 0), axis=1)
    return batch


@cache
def _library() -> ctypes.CDLL:
    library = load_library("datakit")
    pointer, number, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.dk_gather.restype = ctypes.c_int
    library.dk_gather.argtypes = [
        pointer, number, number, number, pointer, flag, flag, pointer, pointer, pointer, pointer, flag,
    ]  # fmt: skip
    return library
