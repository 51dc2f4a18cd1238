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

from datakit import BatchOptions, Blend, Cursor, Loader, TokenStore, write_store
from datakit.loading.loader import REMOTE_STEPS_AHEAD
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
    with Loader(blend, 50, 2, options=BatchOptions(mask_eod_loss=True, reset_positions=True)) as loader:
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


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, 1, 0, 1), "micro_batch_size is a whole number of 1 or more, not 0"),
        ((2.0, 1, 0, 1), "micro_batch_size is a whole number of 1 or more, not 2.0"),
        ((1, None, 0, 1), "num_microbatches is a whole number of 1 or more, not None"),
        ((1, 1, 1, 1), "dp_rank is a whole number up to 0, not 1"),
        ((1, 1, -1, 1), "dp_rank is a whole number of 0 or more, not -1"),
        ((1, 1, 0, 0), "dp_size is a whole number of 1 or more, not 0"),
        ((1, 1, 0, 1, {"seed": 1}), "cursor is of class Cursor, not dict"),
        ((1, 1, 0, 1, None, {}), "options is of class BatchOptions, not dict"),
    ],
)
def test_faulty_arguments(blend: Blend, arguments: Any, text: str) -> None:
    with pytest.raises(UserError, match=text):
        Loader(blend, *arguments)


def test_a_store_is_no_blend(blend: Blend) -> None:
    with pytest.raises(UserError, match="blend is of class Blend, not TokenStore"):
        Loader(blend.stores[0], 1, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("most_ahead", [1, REMOTE_STEPS_AHEAD])
def test_damage_found_while_reading_ahead_is_raised_by_the_step_it_belongs_to(tmp_path: Path, most_ahead: int) -> None:
    store = write_store(tmp_path / "a", [range(9)] * 20, vocab_size=99, shard_documents=1)
    stream = Blend([(store, 1)], seq_length=L, seed=1)
    index = tmp_path / "a" / "shard-000009-000.idx"
    index.write_bytes(b"X" + index.read_bytes()[1:])
    with Loader(stream, 1, 1) as loader, Loader(stream, 1, 1) as plain:
        loader._most_ahead = most_ahead
        with pytest.raises(CheckFailed, match=index.name):
            [loader.next_step() for _ in range(40)]
        read = loader.cursor.num_samples
        with pytest.raises(CheckFailed, match=index.name):
            loader.next_step()
        assert loader.cursor.num_samples == read
        with pytest.raises(CheckFailed, match=index.name):
            [plain.next_step() for _ in range(40)]
        assert plain.cursor == loader.cursor


CALLS = st.lists(st.sampled_from(["next", "next in memory", "prefetch", "prefetch in memory", "go back"]), max_size=12)


@given(calls=CALLS, most_ahead=st.integers(1, REMOTE_STEPS_AHEAD))
def test_whatever_is_made_ahead_steps_come_in_order(blend: Blend, calls: list[str], most_ahead: int) -> None:
    with Loader(blend, 2, 1) as loader:
        loader._most_ahead = most_ahead
        memory, states = memory_for(loader), [loader.state_dict()]
        for call in calls:
            number = len(states) - 1
            if call == "go back":
                states = states[: number // 2 + 1]
                loader.load_state_dict(states[-1])
            elif call.startswith("prefetch"):
                loader.prefetch(memory if "memory" in call else None)
                assert loader.state_dict() == states[-1]
            else:
                step = loader.next_step(memory if "memory" in call else None)
                assert (step.tokens[0] == blend.batch([2 * number, 2 * number + 1]).tokens).all()
                states.append(loader.state_dict())


def test_a_loader_goes_on_in_a_process_that_unpickles_it(blend: Blend) -> None:
    with Loader(blend, 2, 3, 1, 2, options=BatchOptions(mask_eod_loss=True)) as loader:
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


def memory_for(loader: Loader) -> np.ndarray:
    return np.full(loader.num_bytes, 0xAA, np.uint8)


def test_a_step_in_the_callers_memory_has_the_same_bytes(blend: Blend) -> None:
    """One buffer for 100 steps, and two by turns with the next step made ahead."""
    with Loader(blend, 2, 3, 1, 2) as plain, Loader(blend, 2, 3, 1, 2) as one, Loader(blend, 2, 3, 1, 2) as two:
        buffer, turns = memory_for(one), [memory_for(two), memory_for(two)]
        for step in range(100):
            expected, found = plain.next_step(), one.next_step(out=buffer)
            assert found.buffer is buffer
            ahead = two.next_step(out=turns[step % 2])
            two.prefetch(out=turns[1 - step % 2])
            assert ahead.buffer is turns[step % 2]
            for batch in (found, ahead):
                assert (batch.buffer == expected.buffer).all()
                assert (batch.first_sample, batch.epochs) == (expected.first_sample, expected.epochs)
                assert batch.tokens.shape == plain.shape == (3, 2, L)
        assert one.cursor == two.cursor == plain.cursor


@pytest.mark.parametrize("num_steps", [0, 1, 7])
def test_a_step_made_ahead_does_not_move_the_cursor(blend: Blend, num_steps: int) -> None:
    with Loader(blend, 2, 3, 1, 2) as whole:
        buffers = [memory_for(whole), memory_for(whole)]
        for step in range(num_steps):
            whole.next_step(out=buffers[step % 2])
            whole.prefetch(out=buffers[1 - step % 2])
        whole.prefetch(out=buffers[num_steps % 2])
        cursor, content = whole.cursor, pickle.dumps(whole)
        assert cursor.num_samples == num_steps * whole.global_batch_size
        expected = whole.next_step(out=buffers[num_steps % 2]).buffer.copy()
        with Loader(blend, 2, 3, 1, 2, cursor) as resumed, pickle.loads(content) as other:
            assert (resumed.next_step().buffer == expected).all()
            assert (other.next_step(out=buffers[0]).buffer == expected).all()


def test_other_memory_than_that_of_the_step_ahead_gets_the_step_too(blend: Blend) -> None:
    with Loader(blend, 2, 1) as loader, Loader(blend, 2, 1) as plain:
        first, second = memory_for(loader), memory_for(loader)
        loader.prefetch(out=first)
        assert loader.next_step(out=second).buffer is second
        assert (second == plain.next_step().buffer).all()
        loader.prefetch(out=first)
        own, expected = loader.next_step(), plain.next_step()  # in memory of its own, and the next one after it
        assert own.buffer is not first
        assert (own.buffer == expected.buffer).all()
        assert (loader.next_step(out=first).buffer == plain.next_step().buffer).all()


def test_memory_that_does_not_fit_is_refused_and_the_stream_goes_on(blend: Blend) -> None:
    with Loader(blend, 2, 1) as loader:
        for give in (loader.next_step, loader.prefetch):
            with pytest.raises(UserError, match=r"of shape \[1, 2, 8\] is uint8\[447\], uint8\[448\] expected"):
                give(np.empty(447, np.uint8))
        assert loader.cursor.num_samples == 0
        assert (loader.next_step(memory_for(loader)).tokens[0] == blend.batch([0, 1]).tokens).all()


def test_a_fork_makes_the_step_ahead_again_in_its_own_memory(blend: Blend) -> None:
    with Loader(blend, 2, 1) as loader:
        buffer = memory_for(loader)
        loader.prefetch(out=buffer)
        child = os.fork()
        batch = loader.next_step(out=buffer)
        if not child:
            signal.alarm(20)
            os._exit(0 if (batch.tokens == blend.batch([0, 1]).tokens).all() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert (batch.tokens == blend.batch([0, 1]).tokens).all()


@pytest.mark.parametrize("number", [-1, 2**62, 1.5, "1", None])
def test_a_sample_that_cannot_be(blend: Blend, number: Any) -> None:
    with Loader(blend, 1, 1) as loader, pytest.raises(UserError, match="whole numbers from 0"):
        loader.sample(number)


RANK_PROGRAM = """
import sys
from datakit import BatchOptions, Blend, Cursor, Loader, TokenStore
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
