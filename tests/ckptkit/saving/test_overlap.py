"""Copies beside the caller's work, and saves through a window smaller than the state."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from ckptkit.format.keys import Seat
from ckptkit.handoff.block_layout import BLOCK_BYTES
from ckptkit.handoff.protocol import Area, Ring, SaveOrder, StagedFile
from ckptkit.handoff.ring_signals import RingSignals
from ckptkit.loading.restore import restore
from ckptkit.model.layout import ParallelLayout
from ckptkit.model.tensor import Piece, TensorInfo
from ckptkit.runs.catalogue import committed_steps
from ckptkit.runs.retention import Retention
from ckptkit.saving.checkpointer import Checkpointer, CheckpointerOptions
from ckptkit.writer.__main__ import NICE
from ckptkit.writer.ring_reader import RingReader
from ckptkit.writer.step import GivenUp
from tests.ckptkit.support.model_tables import gpt_tensors, values
from tests.ckptkit.support.saves import (
    NUM_LAYERS,
    ONE,
    ROOT,
    assert_holds,
    is_running,
    pieces_of,
    save_one,
    start_rank,
    wait_until,
)  # fmt: skip
from threefold.errors import StorageError
from threefold.storage import open_storage

WINDOW = CheckpointerOptions(window_bytes=2 * BLOCK_BYTES)
LARGE = gpt_tensors(hidden=128, ffn=1024, vocab=7000)


def begin(checkpointer: Checkpointer, step: int, pieces: list[Piece], tensors: list[TensorInfo]) -> None:
    meta = {"scale": 1}
    checkpointer.save(
        step, pieces, tensors=tensors, layout=ONE, num_layers=NUM_LAYERS, metadata=meta, overlap=True
    )  # fmt: skip


@pytest.mark.ci
@pytest.mark.parametrize("options", [CheckpointerOptions(), WINDOW], ids=["arena", "window"])
@pytest.mark.parametrize("place", ["local", pytest.param("s3", marks=pytest.mark.slow)])
def test_what_changes_after_the_join_is_not_saved(
    place: str, options: CheckpointerOptions, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = str(tmp_path / "run") if place == "local" else request.getfixturevalue("s3_url")
    assert sum(info.size_bytes for info in LARGE) > 2 * 2 * BLOCK_BYTES
    pieces = pieces_of(LARGE, ONE, 0, values(LARGE))
    with Checkpointer(url, attempt="a", options=options) as checkpointer:
        for step in (1, 2):
            begin(checkpointer, step, pieces, LARGE)
            checkpointer.join()
            assert checkpointer.join() == 0.0
            for piece in pieces:
                piece.data[:] = -1
        assert all(report.ok and report.stall_s > 0 for report in checkpointer.wait())
    assert_holds(url, 1, LARGE)
    restored = pieces_of(LARGE, ONE, 0)
    restore(url, 2, restored)
    assert all((piece.data == -1).all() for piece in restored)


@pytest.mark.parametrize("options", [CheckpointerOptions(), WINDOW], ids=["arena", "window"])
def test_tensors_that_are_dropped_or_replaced_before_the_join_are_saved(
    tmp_path: Path, options: CheckpointerOptions
) -> None:
    pieces = pieces_of(LARGE, ONE, 0, values(LARGE))
    with Checkpointer(str(tmp_path), attempt="a", options=options) as checkpointer:
        begin(checkpointer, 1, pieces, LARGE)
        pieces[:] = pieces_of(LARGE, ONE, 0)  # their memory may be reused at once
        [np.full(len(piece.data), 7.0, np.float32) for piece in pieces]
        checkpointer.poll()
        begin(checkpointer, 2, pieces, LARGE)  # joins the first
    assert_holds(tmp_path, 1, LARGE)
    assert committed_steps(open_storage(tmp_path)) == [1, 2]


@pytest.mark.ci
@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_writer_that_dies_or_fails_frees_a_trainer_that_waits_for_room(tmp_path: Path, overlap: bool) -> None:
    pieces = pieces_of(LARGE, ONE, 0, values(LARGE))
    common = {"tensors": LARGE, "layout": ONE, "num_layers": NUM_LAYERS, "metadata": {"scale": 1}, "overlap": overlap}
    (tmp_path / "step-000000001").write_bytes(b"in the way")
    with Checkpointer(str(tmp_path), attempt="a", options=WINDOW) as checkpointer:
        checkpointer.save(1, pieces, **common)
        assert "cannot write" in checkpointer.wait()[0].error
        writer = checkpointer.writer_pid
        os.kill(writer, signal.SIGSTOP)
        killing = threading.Timer(0.5, os.kill, (writer, signal.SIGKILL))
        killing.start()
        checkpointer.save(2, pieces, **common)
        killing.join()
        assert "was killed by SIGKILL while it saved step 2" in checkpointer.wait()[0].error
        checkpointer.save(3, pieces, **common)
        assert checkpointer.wait()[0].ok
    assert committed_steps(open_storage(tmp_path)) == [3]
    assert_holds(tmp_path, 3, LARGE)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_writer_that_hangs_frees_a_trainer_that_waits_for_room(tmp_path: Path, overlap: bool) -> None:
    pieces = pieces_of(LARGE, ONE, 0, values(LARGE))
    options = CheckpointerOptions(timeout_s=1.0, window_bytes=2 * BLOCK_BYTES)
    with Checkpointer(str(tmp_path), attempt="a", options=options) as checkpointer:
        os.kill(checkpointer.writer_pid, signal.SIGSTOP)
        checkpointer.save(
            1, pieces, tensors=LARGE, layout=ONE, num_layers=NUM_LAYERS, metadata={}, overlap=overlap
        )  # fmt: skip
        assert not checkpointer.wait()[0].ok
    assert committed_steps(open_storage(tmp_path)) == []


@pytest.mark.ci
@pytest.mark.slow
def test_a_step_whose_trainer_died_while_it_was_staged_leaves_nothing(tmp_path: Path) -> None:
    trainer = start_rank(str(tmp_path), "--steps", 1, "--hidden", 512, "--window-blocks", 2, "--then", "kill-within")
    output, _ = trainer.communicate(timeout=60)
    assert trainer.returncode == -signal.SIGKILL
    writer = int(output.split()[1])
    wait_until(lambda: not is_running(writer))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def order(num_blocks: int, num_slots: int, size_bytes: int) -> SaveOrder:
    return SaveOrder(
        seat=Seat("", 4, "a", 2, 3), files=(StagedFile(size_bytes, 0, Area(0, 0)),),
        ring=Ring(16, 10, num_slots, num_blocks), draft=Area(0, 0), layout={}, num_layers=1, metadata={},
        arena_bytes=16 + 10 * num_slots, deadline_s=0.1, retry_s=0.0, retention=Retention(), code="", stripe_count=0,
        stripe_size_bytes=0, num_threads=1,
    )  # fmt: skip


@pytest.mark.parametrize(("num_slots", "runs"), [(5, [20, 27]), (2, [10, 10, 10, 10, 7]), (4, [20, 20, 7])])
def test_blocks_come_in_runs_and_are_released(num_slots: int, runs: list[int]) -> None:
    signals, memory = RingSignals(), np.zeros(100, np.uint8)
    blocks = RingReader(order(5, num_slots, 47), memory, signals, os.getppid())
    signals.staged.add(2)
    addresses = []
    for rows in blocks.of_file(0):
        addresses.append(int(rows[0, 1]))
        if len(addresses) == 1:
            assert signals.released.take() == 0
            signals.staged.add(3)
    assert addresses == runs
    assert signals.released.take() == 5
    signals.close()


def test_a_wait_for_blocks_ends() -> None:
    signals, memory = RingSignals(), np.zeros(100, np.uint8)
    signals.staged.add(2)
    with pytest.raises(StorageError, match=r"writer 2: nothing came from the trainer for 0\.1 s after 2 of 5 blocks"):
        list(RingReader(order(5, 2, 47), memory, signals, os.getppid()).of_file(0))
    with pytest.raises(StorageError, match="writer 2: the trainer died after 0 of 5 blocks of step 4"):
        list(RingReader(order(5, 2, 47), memory, signals, 1 << 30).of_file(0))
    signals.stop.add()
    with pytest.raises(GivenUp, match="step 4 was given up"):
        list(RingReader(order(5, 2, 47), memory, signals, os.getppid()).of_file(0))
    signals.close()


def test_a_save_of_many_ranks_needs_no_collective_and_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from tests.ckptkit.support.saves import *; layout = ParallelLayout(dp=2)\n"
        f"with Checkpointer({str(tmp_path)!r}, rank=int(sys.argv[1]), world_size=2, attempt='a') as checkpointer:\n"
        "    save_one(checkpointer, 1, SMALL, layout, int(sys.argv[1])); assert checkpointer.wait()[0].ok\n"
        "assert 'torch' not in sys.modules\n"
    )
    ranks = [subprocess.Popen([sys.executable, "-c", program, str(rank)], cwd=ROOT) for rank in (0, 1)]
    assert [rank.wait(timeout=60) for rank in ranks] == [0, 0]
    assert_holds(tmp_path, 1, gpt_tensors())


def test_after_prepare_a_first_save_imports_nothing(tmp_path: Path) -> None:
    program = (
        "import sys; from ckptkit import *; import numpy as np\n"
        "tensors = [TensorInfo('a', 'F32', (1024,), Placement(0))]\n"
        "pieces = [Piece.whole('a', Box((0,), (1024,)), np.zeros(1024, np.float32))]\n"
        f"with Checkpointer({str(tmp_path / 'run')!r}, attempt='a') as checkpointer:\n"
        "    checkpointer.prepare(pieces, tensors)\n"
        "    loaded = set(sys.modules)\n"
        "    checkpointer.save(1, pieces, tensors=tensors, layout=ParallelLayout(), num_layers=1, metadata={})\n"
        "    print('imported', *sorted(set(sys.modules) - loaded))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("imported\n", 0), done.stderr


def test_a_later_save_of_the_same_structure_plans_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = gpt_tensors()
    with Checkpointer(str(tmp_path), attempt="a") as checkpointer:
        save_one(checkpointer, 1, tensors)
        for name in ("plan_save", "Root"):
            monkeypatch.setattr(f"ckptkit.saving.staging.{name}", None)
        monkeypatch.setattr("ckptkit.saving.staging.Arena.put", None)
        save_one(checkpointer, 2, tensors, scale=2, note="metadata is new")
        assert all(report.ok for report in checkpointer.wait())
    assert_holds(tmp_path, 2, tensors, scale=2)


def test_the_writer_steps_back(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path), attempt="a") as checkpointer:
        save_one(checkpointer, 1, gpt_tensors())
        checkpointer.wait()
        writer = checkpointer.writer_pid
        assert os.getpriority(os.PRIO_PROCESS, writer) == min(os.getpriority(os.PRIO_PROCESS, 0) + NICE, 19)
        if shutil.which("ionice"):
            command = ["ionice", "-p", str(writer)]
            assert subprocess.run(command, capture_output=True, check=True).stdout == b"best-effort: prio 7\n"


def test_ranks_of_different_windows_make_one_step(tmp_path: Path) -> None:
    layout = ParallelLayout(tp=2)
    made = [CheckpointerOptions(), CheckpointerOptions(window_bytes=1)]
    checkpointers = [
        Checkpointer(str(tmp_path), rank=rank, world_size=2, attempt="a", options=options)
        for rank, options in enumerate(made)
    ]
    for rank, checkpointer in enumerate(checkpointers):
        save_one(checkpointer, 1, LARGE, layout, rank)
    assert all(checkpointer.close()[0].ok for checkpointer in checkpointers)
    assert_holds(tmp_path, 1, LARGE)


def test_a_trainer_may_have_many_files_open(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip("so many open files are not permitted here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with Checkpointer(str(tmp_path), attempt="a", options=WINDOW) as checkpointer:
            save_one(checkpointer, 1, LARGE)
            assert checkpointer.wait()[0].ok
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert_holds(tmp_path, 1, LARGE)
