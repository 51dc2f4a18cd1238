"""The native batch gather against its numpy reference, and its refusal of rows that are not whole."""

import ctypes
import errno
import math
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datakit import TokenStore, write_store
from datakit.batches.batch import PLAIN, BatchOptions, HostBatch
from datakit.batches.gather import gather
from datakit.batches.row_pieces import ShardTable
from datakit.format.native import library
from datakit.store.token_store import NO_EOD

ROOT = Path(__file__).parents[3]
ARRAYS = ["tokens", "labels", "positions", "loss_mask"]


class Rows:
    """Rows of stores that begin at addresses, gathered natively and by the reference."""

    def __init__(self, seq_length: int, places: Sequence[tuple[TokenStore, int]]) -> None:
        self.seq_length = seq_length
        self.stores = list({id(store): store for store, _ in places}.values())
        self.sources = np.array([self.stores.index(store) for store, _ in places])
        self.starts = [start for _, start in places]
        self.tokens = [store.tokens(start, start + seq_length + 1) for store, start in places]
        self.table = ShardTable(self.stores)
        self.eod_ids = self.table.eod_ids[self.sources]

    def gather(self, options: BatchOptions = PLAIN, *, tokens_only: bool = False) -> HostBatch:
        num_rows = len(self.starts)
        columns = (range(num_rows), self.sources, self.starts, [self.seq_length + 1] * num_rows, [0] * num_rows)
        spans = np.array(columns, np.int64).T.copy()
        pieces = self.table.place(self.table.cut(self.sources, np.array(self.starts), spans))
        return gather(pieces, self.eod_ids, self.seq_length, options, tokens_only=tokens_only)


def gather_reference(rows: Rows, *, mask_eod_loss: bool = False, reset_positions: bool = False) -> HostBatch:
    """Return what `gather` does, in numpy."""
    batch = HostBatch.allocate(len(rows.tokens), rows.seq_length)
    for row, tokens in enumerate(rows.tokens):
        batch.tokens[row], batch.labels[row] = tokens[:-1], tokens[1:]
    eod_ids = rows.eod_ids[:, None]
    is_eod = (batch.tokens == eod_ids) & (eod_ids != NO_EOD)
    batch.loss_mask[:] = ~is_eod if mask_eod_loss else 1
    positions = np.arange(rows.seq_length)
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
    owned = [stores[owner] for owner in owners]
    starts = [data.draw(st.integers(0, store.num_tokens - seq_length - 1)) for store in owned]
    rows = Rows(seq_length, list(zip(owned, starts)))
    tokens_only &= not mask and not reset
    native = rows.gather(BatchOptions(mask, reset), tokens_only=tokens_only)
    reference = gather_reference(rows, mask_eod_loss=mask, reset_positions=reset)
    assert native.is_tokens_only == tokens_only
    for name in ARRAYS:
        found = getattr(native, name)
        assert found.shape == (len(owners), seq_length)
        assert np.array_equal(found, getattr(reference, name)), name
        assert np.shares_memory(found, native.buffer) == (name in ARRAYS[:2] or not tokens_only)
    for row, tokens in enumerate(rows.tokens):
        assert native.tokens[row].tolist() == tokens[:-1].tolist()
        assert native.labels[row].tolist() == tokens[1:].tolist()


def test_end_of_document_masks_its_own_position_and_restarts_the_next(tmp_path: Path) -> None:
    store = write_store(tmp_path / "a", [[1, 2, 0], [3, 0, 4, 5, 6]], vocab_size=9, eod_id=0)
    rows = Rows(7, [(store, 0)])
    batch = rows.gather(BatchOptions(True, True))
    assert batch.tokens.tolist() == [[1, 2, 0, 3, 0, 4, 5]]
    assert batch.loss_mask.tolist() == [[1, 1, 0, 1, 0, 1, 1]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0, 1]]
    plain = rows.gather()
    assert plain.positions.tolist() == [list(range(7))]
    assert plain.loss_mask.tolist() == [[1] * 7]


def test_many_rows_use_threads(tmp_path: Path) -> None:
    tokens = np.random.default_rng(1).integers(0, 60000, 40_000)
    store = write_store(tmp_path / "a", np.split(tokens, 40), vocab_size=60000, shard_documents=9)
    rows = Rows(1024, [(store, 60 * row) for row in range(600)])
    native, reference = rows.gather(), gather_reference(rows)
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
    native = np.array([[row, source.ctypes.data, count, size, 0] for row, count, size in table], np.int64).reshape(
        -1, 5
    )
    out, eod = np.zeros(4 * 8, np.int64), np.full(1, -1, np.int64)
    address = ctypes.c_void_p(out.ctypes.data)
    code = library().dk_gather(
        native.ctypes.data, len(native), 1, 4, eod.ctypes.data, 0, 0, address, address, address, address, 1
    )
    assert code < 0
    assert not out.any()


def test_rows_of_any_length_at_any_address_hold_their_tokens(tmp_path: Path) -> None:
    """Vectors of eight tokens and what is left over, of both sizes of tokens."""
    for vocab_size in (60_000, 70_000):
        tokens = np.random.default_rng(2).integers(0, vocab_size, 400)
        store = write_store(tmp_path / str(vocab_size), [tokens], vocab_size=vocab_size)
        for length in range(1, 140):
            assert (
                Rows(length, [(store, length)]).gather().labels[0].tolist()
                == tokens[length + 1 : 2 * length + 1].tolist()
            )


# a shard and a packing index that are cut short while their store is read
CUT_SHORT = """
import os, sys
from pathlib import Path
import numpy as np
from datakit import BatchOptions, Blend, Loader, Packing, TokenStore, write_store
from datakit.cli import main
from threefold.errors import StorageError

folder, packing, what = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
write_store(folder, [np.arange(200) % 60 for _ in range(500)], vocab_size=61, eod_id=60)
if packing != "concat":
    main(["pack", str(folder), "--seq-length", "64"])
rows = None if packing == "concat" else Packing(packing, 64)
blend = Blend([(TokenStore.open(folder, rows=rows), 1.0)], seq_length=64, seed=1)
with Loader(blend, 64, 4) as loader:
    loader.next_step()
    for path in folder.rglob(what):
        os.truncate(path, 8192)
    for number in range(2):  # the second call meets it again
        try:
            while True:
                loader.next_step()
        except StorageError as error:
            print(error.message)
"""


@pytest.mark.parametrize(("packing", "what"), [("concat", "*.bin"), ("best_fit", "*.bin"), ("best_fit", "*starts*")])
def test_a_file_that_is_cut_short_is_an_error_that_names_it(packing: str, what: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CUT_SHORT, tmp_path / "store", packing, what],
        capture_output=True, text=True, cwd=ROOT, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if "cut short" in line]
    assert len(said) == 2, done.stdout
    for line in said:
        assert re.fullmatch(rf"{tmp_path}/store/\S+ was cut short while it was read: it has 8192 bytes now, .*", line)


def test_what_no_memory_is_enough_for_is_an_error() -> None:
    most = 1 << 60
    starts, spans, out = np.array([0, 10]), np.array([0, 0, 0, 5, 0]), np.empty(64, np.int64)
    stores = np.array([starts.ctypes.data, 1, 2])
    count = library().dk_cut(
        stores.ctypes.data, spans.ctypes.data, 1, 0, most, *(out.ctypes.data + 8 * at for at in (0, 8, 16, 24))
    )
    assert count == -(2**63)


@pytest.mark.parametrize("weight", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_no_number_is_refused(weight: float) -> None:
    weights, chosen, counts = np.array([0.5, weight, 0.5]), np.full(8, 9, np.uint16), np.full((3, 3), 9)
    addresses = weights.ctypes.data, 3, 8, 4, chosen.ctypes.data, counts.ctypes.data
    assert library().dk_greedy_blend(*addresses) == -errno.EINVAL
    assert (chosen == 9).all()
    assert (counts == 9).all()
