"""The batch gather: rows of L + 1 tokens, in spans of mapped shards, become tokens, labels, positions and loss mask.

csrc/datakit/gather.cpp reads every source token once, without the GIL, on several threads; its test says the same in
numpy.
"""

from array import array

from datakit.store.shard import TokenShard
from datakit.store.token_store import TokenStore
from datakit.stream.batch import PLAIN, BatchOptions, Bytes, HostBatch
from datakit.stream.native import address_of, stream_library

NO_EOD = -1
MAX_THREADS = 4
_TOKENS_A_THREAD = 1 << 18  # below this a further thread costs more than it brings


class RowSpans:
    """The places of a batch's rows in mapped shards; holds the shards while the batch is made.

    `table` has for each span its row, shard, first token there and tokens, in the order of rows and places in them.
    """

    def __init__(self, seq_length: int) -> None:
        self.seq_length = seq_length
        self.eod_ids: list[int] = []
        self.table: list[tuple[int, TokenShard, int, int]] = []

    @property
    def num_rows(self) -> int:
        """Rows of the batch."""
        return len(self.eod_ids)

    def add(self, store: TokenStore, start: int) -> None:
        """Let the next row begin at a token address of the store."""
        row, remaining = self.num_rows, self.seq_length + 1
        self.eod_ids.append(NO_EOD if store.eod_id is None else store.eod_id)
        while remaining:
            number, first = store.locate_token(start)
            shard = store.shard(number)
            count = min(first + shard.num_tokens - start, remaining)
            self.table.append((row, shard, start - first, count))
            start, remaining = start + count, remaining - count


def gather(spans: RowSpans, options: BatchOptions = PLAIN, out: Bytes | None = None) -> HostBatch:
    """Make a batch [rows, seq_length], in the memory `out` if it is given."""
    num_rows, seq_length = spans.num_rows, spans.seq_length
    batch = HostBatch.allocate(num_rows, seq_length) if out is None else HostBatch.over(out, (num_rows, seq_length))
    native = array("q")  # a dk_piece each
    for row, shard, start, count in spans.table:
        itemsize = shard.dtype.itemsize
        native.extend((row, shard.address + start * itemsize, count, itemsize))
    eod_ids = array("q", spans.eod_ids)
    num_tokens = num_rows * seq_length
    num_threads = max(1, min(MAX_THREADS, num_tokens // _TOKENS_A_THREAD))
    tokens, column_bytes = address_of(batch.buffer), 8 * num_tokens
    code = stream_library().dk_gather(
        native.buffer_info()[0], len(spans.table), num_rows, seq_length, eod_ids.buffer_info()[0],
        options.mask_eod_loss, options.reset_positions, tokens, tokens + column_bytes, tokens + 2 * column_bytes,
        tokens + 3 * column_bytes, num_threads,
    )  # fmt: skip
    assert code == 0, "the spans of every row sum to seq_length + 1 tokens of 2 or 4 bytes"
    return batch
