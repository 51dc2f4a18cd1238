"""Loader: one global stream under any dp size and batch size, exact resume from anywhere, in one process or several."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datakit import Blend, Cursor, Loader, TokenStore, write_store
from threefold.errors import CheckFailed, UserError

L = 8


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[TokenStore]:
    folder, rng = tmp_path_factory.mktemp("stores"), np.random.default_rng(0)
    return [
        write_store(folder / str(size), np.array_split(rng.integers(0, 99, size), 7), vocab_size=99, eod_id=0)
        for size in (700, 300)
    ]


@pytest.fixture(scope="module")
def blend(stores: list[TokenStore]) -> Blend:
    return Blend([(stores[0], 2), (stores[1], 1)], seq_length=L, seed=5)


def global_step(blend: Blend, shape: tuple[int, int, int], cursor: Cursor) -> tuple[np.ndarray, Cursor]:
    """One step of all ranks in global sample order, and the cursor after it, which is every rank's."""
    num_microbatches, micro_batch_size, dp_size = shape
    rows, cursors = [], set()
    for rank in range(dp_size):
        with Loader(blend, micro_batch_size, num_microbatches, rank, dp_size, cursor) as loader:
            batch = loader.next_step()
            cursors.add(loader.cursor)
        assert batch.first_sample == cursor.num_samples
        assert batch.tokens.shape == (num_microbatches, micro_batch_size, L)
        rows.append(batch.tokens)
    assert len(cursors) == 1
    return np.stack(rows, axis=1).reshape(-1, L), cursors.pop()


SHAPES = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=5)


@settings(max_examples=25)
@given(shapes=SHAPES)
def test_any_sequence_of_layouts_reads_the_one_stream(blend: Blend, shapes: list[tuple[int, int, int]]) -> None:
    cursor, steps = Cursor.start(blend), []
    for shape in shapes:
        rows, cursor = global_step(blend, shape, Cursor.from_json(json.loads(json.dumps(cursor.to_json()))))
        steps.append(rows)
    found = np.concatenate(steps)
    assert len(found) == cursor.num_samples
    assert (found == blend.batch(np.arange(len(found))).tokens).all()


@settings(max_examples=15)
@given(num_steps=st.integers(0, 40), later=st.integers(1, 10))
def test_resume_equals_the_uninterrupted_stream(blend: Blend, num_steps: int, later: int) -> None:
    with Loader(blend, 2, 3, 1, 2) as whole:
        for _ in range(num_steps):
            whole.next_step()
        cursor = whole.cursor
        assert cursor.num_samples == num_steps * whole.global_batch_size
        with Loader(blend, 2, 3, 1, 2, cursor) as resumed:
            for _ in range(later):
                first, second = whole.next_step(), resumed.next_step()
                assert (first.buffer == second.buffer).all()
                assert (first.first_sample, first.epochs) == (second.first_sample, second.epochs)


def test_the_place_of_each_row_is_the_contracts(blend: Blend) -> None:
    num_microbatches, micro_batch_size, dp_size, rank = 3, 2, 4, 2
    with Loader(blend, micro_batch_size, num_microbatches, rank, dp_size, Cursor.start(blend, 48)) as loader:
        for step in (2, 3):
            batch = loader.next_step()
            for m in range(num_microbatches):
                for i in range(micro_batch_size):
                    number = step * 24 + (m * dp_size + rank) * micro_batch_size + i
                    assert (batch.tokens[m, i] == loader.sample(number).tokens[0, 0]).all()


def test_epochs_are_counted_as_they_end(stores: list[TokenStore]) -> None:
    stream = Blend([(stores[0], 1)], seq_length=L)  # 87 rows
    with Loader(stream, 29, 1) as loader:
        assert [next(iter(loader)).epochs for _ in range(7)] == [(0,), (0,), (1,), (1,), (1,), (2,), (2,)]


def test_options_reach_the_batch(blend: Blend) -> None:
    with Loader(blend, 50, 2, mask_eod_loss=True, reset_positions=True) as loader:
        batch = loader.next_step()
    assert (batch.loss_mask == (batch.tokens != 0)).all()
    restarts = np.argwhere(batch.positions[..., 1:] == 0)
    assert len(restarts)
    assert all(batch.tokens[m, i, at] == 0 for m, i, at in restarts)
    assert [array.dtype for array in (batch.tokens, batch.labels, batch.positions)] == [np.int64] * 3
    assert batch.loss_mask.dtype == np.float32


def test_the_cursor_is_small_and_checked(blend: Blend) -> None:
    cursor = Cursor.start(blend, 10**15)
    assert len(json.dumps(cursor.to_json())) < 1024
    assert Cursor.from_json(cursor.to_json()) == cursor
    for value in (None, {}, {"version": 2}, {"version": 1, "num_samples": 1}, cursor.to_json() | {"seed": None}):
        with pytest.raises(UserError, match="is not a cursor"):
            Cursor.from_json(value)
    with pytest.raises(UserError, match="seed"):
        Loader(blend, 1, 1, cursor=Cursor(0, 6, L, 1, blend.digest()))


@pytest.mark.parametrize("arguments", [(0, 1, 0, 1), (1, 0, 0, 1), (1, 1, 1, 1), (1, 1, -1, 1)])
def test_faulty_shapes(blend: Blend, arguments: tuple[int, int, int, int]) -> None:
    with pytest.raises(UserError, match="micro-batches"):
        Loader(blend, *arguments)


def test_damage_found_while_reading_ahead_is_raised_by_the_step_it_belongs_to(tmp_path: Path) -> None:
    store = write_store(tmp_path / "a", [range(9)] * 20, vocab_size=99, shard_documents=1)
    stream = Blend([(store, 1)], seq_length=L, seed=1)
    index = tmp_path / "a" / "shard-000009-000.idx"
    index.write_bytes(b"X" + index.read_bytes()[1:])
    with Loader(stream, 1, 1) as loader:
        with pytest.raises(CheckFailed, match=index.name):
            [loader.next_step() for _ in range(40)]
        read = loader.cursor.num_samples
        with pytest.raises(CheckFailed, match=index.name):
            loader.next_step()
        assert loader.cursor.num_samples == read


def test_a_loader_goes_on_in_a_process_that_unpickles_it(blend: Blend) -> None:
    with Loader(blend, 2, 3, 1, 2, mask_eod_loss=True) as loader:
        loader.next_step()
        content = pickle.dumps(loader)
        expected = loader.next_step()
        with pickle.loads(content) as other:
            found = other.next_step()
            assert other.cursor == loader.cursor
    assert (found.buffer == expected.buffer).all()
    assert (found.first_sample, found.epochs) == (expected.first_sample, expected.epochs)


def test_a_pickled_stream_keeps_its_segments(stores: list[TokenStore], monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Blend([(stores[0], 2), (stores[1], 0)], seq_length=L, seed=5, later=[(40, [1, 3])])
    content = pickle.dumps(stream)
    monkeypatch.chdir("/")
    found = pickle.loads(content)
    assert found.digest() == stream.digest()
    assert (found.batch(range(100)).tokens == stream.batch(range(100)).tokens).all()


def test_another_store_at_the_path_of_a_pickled_one_is_refused(tmp_path: Path) -> None:
    content = pickle.dumps(write_store(tmp_path / "a", [[1, 2]], vocab_size=9))
    shutil.rmtree(tmp_path / "a")
    write_store(tmp_path / "a", [[1, 3]], vocab_size=9)
    with pytest.raises(CheckFailed, match="is not the store that was pickled"):
        pickle.loads(content)


def test_both_sides_of_a_fork_go_on(blend: Blend) -> None:
    with Loader(blend, 2, 1) as loader:
        loader.next_step()
        child = os.fork()
        batch = loader.next_step()
        if not child:
            signal.alarm(20)
            os._exit(0 if (batch.tokens == blend.batch([2, 3]).tokens).all() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert (batch.tokens == blend.batch([2, 3]).tokens).all()


@pytest.mark.parametrize("number", [-1, 2**62, 1.5, "1", None])
def test_a_sample_that_cannot_be(blend: Blend, number: Any) -> None:
    with Loader(blend, 1, 1) as loader, pytest.raises(UserError, match="whole numbers from 0"):
        loader.sample(number)


RANK_PROGRAM = """
import sys
from datakit import Blend, Cursor, Loader, TokenStore
folder, rank, size, num_samples = sys.argv[1], *map(int, sys.argv[2:])
blend = Blend([(TokenStore.open(f"{folder}/a"), 2), (TokenStore.open(f"{folder}/b"), 1)], seq_length=8, seed=5)
with Loader(blend, 2, 12 // (2 * size), rank, size, Cursor.start(blend, num_samples)) as loader:
    for step in range(3):
        for row in loader.next_step().tokens.reshape(-1, 8).tolist():
            print(*row)
"""


def test_processes_of_two_layouts_read_the_same_samples(tmp_path: Path) -> None:
    for name, size in (("a", 700), ("b", 300)):
        write_store(tmp_path / name, [np.random.default_rng(size).integers(0, 99, size)], vocab_size=99)
    steps: dict[int, list[str]] = {}
    for dp_size in (1, 3):
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", RANK_PROGRAM, tmp_path, str(rank), str(dp_size), "24"],
                stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3],
            )
            for rank in range(dp_size)
        ]  # fmt: skip
        outputs = [process.communicate(timeout=60)[0] for process in processes]
        assert all(process.returncode == 0 for process in processes)
        steps[dp_size] = sorted("".join(outputs).splitlines())
    assert len(steps[1]) == 36
    assert steps[1] == steps[3]


def test_the_start_reads_no_more_of_a_large_stream(blend: Blend) -> None:
    with Loader(blend, 2, 1, cursor=Cursor.start(blend, 10**13)) as loader:
        batch = loader.next_step()
    assert batch.first_sample == 10**13
    assert (batch.tokens[0] == blend.batch([10**13, 10**13 + 1]).tokens).all()
