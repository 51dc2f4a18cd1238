"""The native batch gather against its numpy reference, and its refusal of rows that are not whole."""

import ctypes
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datakit import TokenStore, write_store
from datakit.store.token_store import NO_EOD
from datakit.stream.batch import BatchOptions, HostBatch
from datakit.stream.gather import RowSpans, gather
from datakit.stream.native import stream_library

ARRAYS = ["tokens", "labels", "positions", "loss_mask"]


class Spans(RowSpans):
    """Row spans that remember the rows' tokens."""

    def __init__(self, seq_length: int) -> None:
        super().__init__(seq_length)
        self.rows: list[np.ndarray] = []

    def add(self, store: TokenStore, start: int) -> None:
        super().add(store, start)
        self.rows.append(store.tokens(start, start + self.seq_length + 1))


def gather_reference(spans: Spans, *, mask_eod_loss: bool = False, reset_positions: bool = False) -> HostBatch:
    """Return what `gather` does, in numpy."""
    batch = HostBatch.allocate(spans.num_rows, spans.seq_length)
    for row, tokens in enumerate(spans.rows):
        batch.tokens[row], batch.labels[row] = tokens[:-1], tokens[1:]
    eod_ids = np.array(spans.eod_ids)[:, None]
    is_eod = (batch.tokens == eod_ids) & (eod_ids != NO_EOD)
    batch.loss_mask[:] = ~is_eod if mask_eod_loss else 1
    positions = np.arange(spans.seq_length)
    batch.positions[:] = positions
    if reset_positions:
        after_eod = np.zeros_like(is_eod)
        after_eod[:, 1:] = is_eod[:, :-1]
        batch.positions[:] -= np.maximum.accumulate(np.where(after_eod, positions, 0), axis=1)
    return batch


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[TokenStore]:
    """uint16 with end-of-document 0, int32 with none, int32 with 5; shards of many lengths, empty ones too."""
    folder, rng = tmp_path_factory.mktemp("stores"), np.random.default_rng(0)

    def documents(vocab_size: int) -> list[np.ndarray]:
        return [rng.integers(0, vocab_size, rng.integers(0, 12)) for _ in range(200)]

    return [
        write_store(folder / "a", documents(8), vocab_size=8, eod_id=0, shard_documents=1),
        write_store(folder / "b", documents(70000), vocab_size=70000, shard_documents=30),
        write_store(folder / "c", documents(9), vocab_size=70000, eod_id=5, shard_documents=3),
    ]


@given(
    data=st.data(), seq_length=st.integers(1, 70), mask=st.booleans(), reset=st.booleans(), tokens_only=st.booleans()
)
def test_native_equals_reference(
    stores: list[TokenStore], data: st.DataObject, seq_length: int, mask: bool, reset: bool, tokens_only: bool
) -> None:
    owners = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=12))
    spans = Spans(seq_length)
    expected = []
    for store in (stores[owner] for owner in owners):
        start = data.draw(st.integers(0, store.num_tokens - seq_length - 1))
        spans.add(store, start)
        expected.append(store.tokens(start, start + seq_length + 1))
    tokens_only &= not mask and not reset
    native = gather(spans, BatchOptions(mask, reset), tokens_only=tokens_only)
    reference = gather_reference(spans, mask_eod_loss=mask, reset_positions=reset)
    assert native.is_tokens_only == tokens_only
    for name in ARRAYS:
        found = getattr(native, name)
        assert found.shape == (len(owners), seq_length)
        assert np.array_equal(found, getattr(reference, name)), name
        assert np.shares_memory(found, native.buffer) == (name in ARRAYS[:2] or not tokens_only)
    for row, tokens in enumerate(expected):
        assert native.tokens[row].tolist() == tokens[:-1].tolist()
        assert native.labels[row].tolist() == tokens[1:].tolist()


def test_end_of_document_masks_its_own_position_and_restarts_the_next(tmp_path: Path) -> None:
    store = write_store(tmp_path / "a", [[1, 2, 0], [3, 0, 4, 5, 6]], vocab_size=9, eod_id=0)
    spans = Spans(7)
    spans.add(store, 0)
    batch = gather(spans, BatchOptions(True, True))
    assert batch.tokens.tolist() == [[1, 2, 0, 3, 0, 4, 5]]
    assert batch.loss_mask.tolist() == [[1, 1, 0, 1, 0, 1, 1]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0, 1]]
    plain = gather(spans)
    assert plain.positions.tolist() == [list(range(7))]
    assert plain.loss_mask.tolist() == [[1] * 7]


def test_many_rows_use_threads(tmp_path: Path) -> None:
    tokens = np.random.default_rng(1).integers(0, 60000, 40_000)
    store = write_store(tmp_path / "a", np.split(tokens, 40), vocab_size=60000, shard_documents=9)
    spans = Spans(1024)
    for row in range(600):
        spans.add(store, 60 * row)
    native, reference = gather(spans), gather_reference(spans)
    assert all(np.array_equal(getattr(native, name), getattr(reference, name)) for name in ARRAYS)


@pytest.mark.parametrize(
    "table",
    [
        [[0, 4, 2]],  # a token is missing
        [[0, 6, 2]],  # one too many
        [[0, 3, 2], [0, 3, 2]],  # one too many, in two spans
        [[0, 5, 3]],  # no known token size
        [[0, -1, 2], [0, 6, 2]],
        [[1, 5, 2]],  # row 0 is missing
        [[0, 5, 2], [1, 5, 2]],  # a row too many
        [],
    ],
)
def test_rows_that_are_not_whole_are_refused(table: list[list[int]]) -> None:
    source = np.arange(16, dtype=np.uint16)
    native = np.array([[row, source.ctypes.data, count, size] for row, count, size in table], np.int64).reshape(-1, 4)
    out, eod = np.zeros(4 * 8, np.int64), np.full(1, -1, np.int64)
    address = ctypes.c_void_p(out.ctypes.data)
    code = stream_library().dk_gather(
        native.ctypes.data, len(native), 1, 4, eod.ctypes.data, 0, 0, address, address, address, address, 1
    )
    assert code < 0
    assert not out.any()
