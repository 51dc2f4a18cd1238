"""Saves through the writer process, under real faults: kills, full disks, broken and slow servers."""

import errno
import json
import os
import re
import resource
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptkit.check.verify import verify_checkpoint
from ckptkit.loading.reader import CheckpointReader
from ckptkit.loading.restore import restore
from ckptkit.model.layout import ParallelLayout
from ckptkit.model.tensor import Placement, TensorInfo
from ckptkit.runs.catalogue import committed_steps
from ckptkit.runs.retention import Retention
from ckptkit.saving.checkpointer import Checkpointer, CheckpointerOptions
from ckptkit.saving.staging import Staging
from ckptkit.tiers.tier import Tier
from tests.ckptkit.support.model_tables import gpt_tensors, values
from tests.ckptkit.support.saves import (
    NUM_LAYERS,
    ONE,
    SMALL,
    assert_holds,
    assert_restored,
    is_running,
    pieces_of,
    save_one,
    save_whole,
    start_rank,
    strace,
    wait_until,
)  # fmt: skip
from tests.support.planted import Planted
from threefold.errors import StorageError, UserError
from threefold.storage import open_storage
from tools.fault_proxy import Fault, FaultProxy


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "run") if request.param == "local" else request.getfixturevalue("s3_url")


@pytest.mark.ci
def test_saves_are_committed_one_after_the_other(url: str) -> None:
    with Checkpointer(url, attempt="a") as checkpointer:
        assert checkpointer.poll() == []
        for step in (10, 20, 30):
            stall_s = save_one(checkpointer, step, SMALL, scale=step)
        reports = checkpointer.wait()
        assert checkpointer.poll() == []
    assert [(report.step, report.ok, report.error) for report in reports] == [(s, True, "") for s in (10, 20, 30)]
    assert reports[-1].stall_s == stall_s
    assert all(report.data_bytes > sum(info.size_bytes for info in SMALL) for report in reports)
    assert committed_steps(open_storage(url)) == [10, 20, 30]
    for step in (10, 20, 30):
        assert_holds(url, step, SMALL, scale=step)


@pytest.mark.ci
def test_what_changes_after_the_save_returned_is_not_saved(url: str) -> None:
    with Checkpointer(url, attempt="a") as checkpointer:
        pieces = pieces_of(SMALL, ONE, 0, values(SMALL))
        for step in (1, 2):
            meta = {"scale": 1}
            checkpointer.save(step, pieces, tensors=SMALL, layout=ONE, num_layers=NUM_LAYERS, metadata=meta)
            for piece in pieces:
                piece.data[:] = -1
        checkpointer.wait()
    assert_holds(url, 1, SMALL)
    restored = pieces_of(SMALL, ONE, 0)
    restore(url, 2, restored)
    assert all((piece.data == -1).all() for piece in restored)


def test_the_arena_grows_with_the_state(tmp_path: Path) -> None:
    large = gpt_tensors(hidden=256, ffn=1024, vocab=5000)
    with Checkpointer(str(tmp_path), attempt="a") as checkpointer:
        for step, tensors in enumerate([SMALL, large, SMALL]):
            save_one(checkpointer, step, tensors)
        assert all(report.ok for report in checkpointer.wait())
    for step, tensors in enumerate([SMALL, large, SMALL]):
        assert_holds(tmp_path, step, tensors)


def test_after_prepare_no_save_grows_the_arena(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(str(tmp_path), attempt="a") as checkpointer:
        checkpointer.prepare(pieces_of(SMALL, ONE, 0, values(SMALL)), SMALL)
        monkeypatch.setattr(os, "posix_fallocate", None)
        for step in (1, 2):
            save_one(checkpointer, step, SMALL, note="x" * 1000)
        assert all(report.ok for report in checkpointer.wait())
    assert_holds(tmp_path, 2, SMALL)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("dtype", "saved_as", "restored_as"),
    [
        ("F32", "tp2-dp2", "pp3"),
        pytest.param("F64", "tp4", "dp4", marks=pytest.mark.slow),
        pytest.param("BF16", "dp2-pp2", "tp3-pp2", marks=pytest.mark.slow),
    ],
)
def test_ranks_in_processes_save_and_any_layout_restores(
    tmp_path: Path, dtype: str, saved_as: str, restored_as: str
) -> None:
    tensors = gpt_tensors(dtype=dtype, hidden=24, kv=12)
    layout = ParallelLayout.parse(saved_as)
    options = ["--layout", saved_as, "--dtype", dtype, "--hidden", 24]
    program = [start_rank(str(tmp_path), *options, "--kv", 12, "--rank", rank) for rank in range(layout.world_size)]
    for rank in program:
        output, _ = rank.communicate(timeout=60)
        assert rank.returncode == 0
        assert json.loads(output.splitlines()[-1])["ok"], output
    other = ParallelLayout.parse(restored_as)
    for rank in range(other.world_size):
        pieces = pieces_of(tensors, other, rank)
        restore(str(tmp_path), 1, pieces, tensors=tensors)
        assert_restored(pieces, pieces_of(tensors, other, rank, values(tensors)))
    with CheckpointReader(open_storage(tmp_path), 1) as reader:
        assert verify_checkpoint(reader).ok
        assert len(reader.root.parts) == layout.world_size


@pytest.mark.ci
def test_torch_tensors_are_saved_and_restored_in_place(url: str) -> None:
    torch = pytest.importorskip("torch")
    for step, (dtype, torch_dtype) in enumerate([("BF16", torch.bfloat16), ("F32", torch.float32)]):
        tensors = gpt_tensors(dtype=dtype)

        def tensor(flat: np.ndarray, torch_dtype: object = torch_dtype) -> object:
            signed = flat.view(np.int16) if flat.dtype == np.uint16 else flat
            return torch.nn.Parameter(torch.from_numpy(signed.copy()).view(torch_dtype))

        saved = pieces_of(tensors, ONE, 0, values(tensors), tensor)
        with Checkpointer(url, attempt="a") as checkpointer:
            checkpointer.save(step, saved, tensors=tensors, layout=ONE, num_layers=NUM_LAYERS, metadata={"scale": 1})
            assert checkpointer.wait()[0].ok
        assert_holds(url, step, tensors)  # as numpy arrays, bfloat16 as uint16
        restored = pieces_of(tensors, ONE, 0, None, tensor)
        restore(url, step, restored, tensors=tensors)
        assert all(torch.equal(a.data, b.data) for a, b in zip(restored, saved, strict=True))


def test_the_writer_has_a_session_and_no_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    assert torch.__file__
    with Checkpointer(str(tmp_path), attempt="a") as checkpointer:
        save_one(checkpointer, 1, SMALL)
        checkpointer.wait()
        writer = checkpointer.writer_pid
        assert os.getsid(writer) == writer != os.getsid(0)
        assert "libtorch" not in Path(f"/proc/{writer}/maps").read_text()
    assert not is_running(writer)


@pytest.mark.ci
@pytest.mark.parametrize("then", ["kill", pytest.param("fork-kill", marks=pytest.mark.slow)])
def test_a_writer_finishes_its_save_after_its_trainer_was_killed(s3_proxy: FaultProxy, s3_url: str, then: str) -> None:
    s3_proxy.fault = Fault("delay", method="PUT", delay_s=0.5)
    trainer = start_rank(s3_url, "--steps", 7, "--then", then)
    output, _ = trainer.communicate(timeout=30) if then == "kill" else (trainer.stdout.readline(), None)
    assert trainer.wait(timeout=30) == -signal.SIGKILL
    writer = int(output.split()[1])
    assert is_running(writer)
    assert committed_steps(open_storage(s3_url)) == []
    wait_until(lambda: committed_steps(open_storage(s3_url)) == [7])
    assert_holds(s3_url, 7, SMALL, scale=7)
    wait_until(lambda: not is_running(writer))  # also while another process holds its pipe open


@pytest.mark.ci
@pytest.mark.slow
def test_a_writer_finishes_local_files_after_its_trainer_was_killed(tmp_path: Path) -> None:
    trainer = start_rank(
        str(tmp_path / "run"), "--steps", 7, "--then", "kill", under=strace("fsync:delay_enter=200000")
    )
    writer = int(trainer.stdout.readline().split()[1])
    wait_until(lambda: committed_steps(open_storage(tmp_path / "run")) == [7])
    assert_holds(tmp_path / "run", 7, SMALL, scale=7)
    wait_until(lambda: not is_running(writer))
    trainer.communicate(timeout=30)


def test_a_new_writer_follows_a_killed_one(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path), attempt="a") as checkpointer:
        first = checkpointer.writer_pid
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: not is_running(first))
        save_one(checkpointer, 1, SMALL)
        assert checkpointer.wait()[0].ok
        os.kill(checkpointer.writer_pid, signal.SIGSTOP)
        save_one(checkpointer, 2, SMALL)
        assert checkpointer.poll() == []
        os.kill(checkpointer.writer_pid, signal.SIGKILL)
        report = checkpointer.wait()[0]
        assert not report.ok
        assert report.error == "rank 0: the writer process was killed by SIGKILL while it saved step 2"
        save_one(checkpointer, 3, SMALL)
        assert checkpointer.wait()[0].ok
    assert committed_steps(open_storage(tmp_path)) == [1, 3]


@pytest.mark.ci
@pytest.mark.slow
def test_a_writer_that_hangs_is_killed(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path), attempt="a", options=CheckpointerOptions(timeout_s=5.0)) as checkpointer:
        os.kill(checkpointer.writer_pid, signal.SIGSTOP)
        save_one(checkpointer, 1, SMALL)
        assert checkpointer.wait()[0].error == "the writer was not done after 5 s and was killed"
        save_one(checkpointer, 2, SMALL)
        checkpointer.wait()
    assert committed_steps(open_storage(tmp_path)) == [2]


@pytest.mark.ci
@pytest.mark.slow
def test_a_writer_that_takes_no_order_is_killed(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path), attempt="a", options=CheckpointerOptions(timeout_s=2.0)) as checkpointer:
        os.kill(checkpointer.writer_pid, signal.SIGSTOP)
        save_one(checkpointer, 1, SMALL, note="x" * (1 << 20))  # more than a pipe holds
        assert checkpointer.wait()[0].error == "the writer was not done after 2 s and was killed"


@pytest.mark.ci
@pytest.mark.slow
def test_a_writer_that_cannot_be_killed_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process that hangs in a dead file system."""
    with Checkpointer(str(tmp_path), attempt="a", options=CheckpointerOptions(timeout_s=5.0)) as checkpointer:
        checkpointer._writer.die_within_s = 0.1
        save_one(checkpointer, 1, SMALL)
        assert checkpointer.wait()[0].ok
        hanging = checkpointer.writer_pid
        with monkeypatch.context() as patched:
            patched.setattr(subprocess.Popen, "kill", lambda process: None)
            os.kill(hanging, signal.SIGSTOP)
            save_one(checkpointer, 2, SMALL)
            assert checkpointer.wait()[0].error == "the writer was not done after 5 s and was killed"
            save_one(checkpointer, 3, SMALL)
            assert checkpointer.wait()[0].ok
        assert checkpointer.writer_pid != hanging
        os.kill(hanging, signal.SIGKILL)
    assert committed_steps(open_storage(tmp_path)) == [1, 3]


def test_what_a_library_prints_does_not_come_between_the_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os; os.nice = lambda by: print('niced', by, flush=True)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with Checkpointer(str(tmp_path / "run"), attempt="a") as checkpointer:
        save_one(checkpointer, 1, SMALL)
        assert checkpointer.wait()[0].ok


def test_the_writer_imports_nothing_from_the_current_folder(planted: Planted) -> None:
    with Checkpointer("run", attempt="a") as checkpointer:
        save_one(checkpointer, 1, SMALL)
        assert checkpointer.wait()[0].ok
    assert planted.executed == []
    assert committed_steps(open_storage("run")) == [1]


@pytest.mark.ci
@pytest.mark.slow
def test_steps_go_on_while_a_slow_storage_takes_its_time(s3_proxy: FaultProxy, s3_url: str) -> None:
    s3_proxy.fault = Fault("delay", method="PUT", delay_s=1.0)
    num_steps = 0
    with Checkpointer(s3_url, attempt="a") as checkpointer:
        save_one(checkpointer, 1, SMALL)
        while not (reports := checkpointer.poll()):
            num_steps += 1  # a training step
            time.sleep(0.002)
    assert reports[0].ok
    assert s3_proxy.num_faults >= 3, "data, index and root were held back"
    assert num_steps > 100


@pytest.mark.ci
@pytest.mark.slow
def test_a_writer_whose_trainer_died_in_the_save_prunes_nothing(s3_proxy: FaultProxy, s3_url: str) -> None:
    assert all(report.ok for report in [save_whole(s3_url, step, SMALL, attempt=f"a{step}") for step in (1, 2)])
    s3_proxy.fault = Fault("delay", method="PUT", delay_s=0.5)
    trainer = start_rank(s3_url, "--steps", 7, "--keep-last", 1, "--then", "kill")
    writer = int(trainer.communicate(timeout=30)[0].split()[1])
    wait_until(lambda: not is_running(writer))
    assert committed_steps(open_storage(s3_url)) == [1, 2, 7]


def test_a_process_that_holds_the_pipe_open_does_not_keep_a_writer_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As forked workers of a data loader do."""
    with Checkpointer(str(tmp_path), attempt="a") as checkpointer:
        held = os.dup(checkpointer._writer._input.fileno())
        save_one(checkpointer, 1, SMALL)
        checkpointer.wait()
        checkpointer._writer.close_within_s = 30.0
        monkeypatch.delattr(subprocess.Popen, "kill")
    os.close(held)


def test_a_rank_that_never_saves_is_named(tmp_path: Path) -> None:
    layout = ParallelLayout(tp=2, dp=2)
    checkpointers = [
        Checkpointer(str(tmp_path), rank=rank, world_size=4, attempt="a", options=CheckpointerOptions(deadline_s))
        for rank, deadline_s in ((0, 0.5), (2, 30.0))
    ]
    save_one(checkpointers[1], 1, SMALL, layout, 2)
    wait_until((tmp_path / "step-000000001/a-0001/part-00002.index").exists)
    save_one(checkpointers[0], 1, SMALL, layout, 0)
    reports = [checkpointer.close()[0] for checkpointer in checkpointers]
    assert "writers 1, 3 of 4 were not done" in reports[0].error
    assert "is not committed: writer 0 failed: " in reports[1].error
    assert "writers 1, 3 of 4 were not done" in reports[1].error
    assert committed_steps(open_storage(tmp_path)) == []


def test_a_rank_that_fails_is_told_to_rank_0_at_once(tmp_path: Path) -> None:
    layout = ParallelLayout(dp=2)
    part = tmp_path / "step-000000001/a-0001/part-00001.safetensors"
    part.mkdir(parents=True)  # in the way of the second rank's file
    with (
        Checkpointer(str(tmp_path), rank=0, world_size=2, attempt="a") as first,
        Checkpointer(str(tmp_path), rank=1, world_size=2, attempt="a") as second,
    ):
        save_one(second, 1, SMALL, layout, 1)
        second_report = second.wait()[0]
        save_one(first, 1, SMALL, layout, 0)
        first_report = first.wait()[0]
    assert "Is a directory" in second_report.error
    assert "writer 1 failed: cannot write" in first_report.error
    assert committed_steps(open_storage(tmp_path)) == []


def test_the_death_of_the_writer_that_commits_is_told_to_the_others_at_once(tmp_path: Path) -> None:
    layout = ParallelLayout(dp=2)
    with (
        Checkpointer(str(tmp_path), rank=0, world_size=2, attempt="a") as first,
        Checkpointer(str(tmp_path), rank=1, world_size=2, attempt="a") as second,
    ):
        os.kill(first.writer_pid, signal.SIGSTOP)
        save_one(first, 1, SMALL, layout, 0)
        save_one(second, 1, SMALL, layout, 1)
        os.kill(first.writer_pid, signal.SIGKILL)
        assert "was killed by SIGKILL" in first.wait()[0].error
        assert "is not committed: writer 0 failed: its writer was killed" in second.wait()[0].error
        kept = {"part-00000.failed", "part-00001.failed", "part-00001.index", "part-00001.safetensors"}
        assert {key.rpartition("/")[2] for key in open_storage(tmp_path).list_keys()} == kept
        save_one(second, 2, SMALL, layout, 1, scale=2)
        save_one(first, 2, SMALL, layout, 0, scale=2)
        assert [each.wait()[0].error for each in (first, second)] == ["", ""]
    assert {key.split("/")[0] for key in open_storage(tmp_path).list_keys()} == {"step-000000002"}
    assert_holds(tmp_path, 2, SMALL, scale=2)


def test_a_committed_step_keeps_no_word_of_failed_tries(tmp_path: Path) -> None:
    layout, options = ParallelLayout(dp=2), CheckpointerOptions(deadline_s=0.5)
    for attempt in ("a-0001", "a-0002"):  # in the way of the second rank's file
        (tmp_path / f"step-000000001/{attempt}/part-00001.safetensors").mkdir(parents=True)
    with (
        Checkpointer(str(tmp_path), rank=0, world_size=2, attempt="a", options=options) as first,
        Checkpointer(str(tmp_path), rank=1, world_size=2, attempt="a") as second,
    ):
        for _ in range(2):
            save_one(first, 1, SMALL, layout, 0)
            assert "writer 1 of 2 was not done" in first.wait()[0].error
            save_one(second, 1, SMALL, layout, 1)
            assert "Is a directory" in second.wait()[0].error
        assert len([key for key in open_storage(tmp_path).list_keys() if key.endswith(".failed")]) == 4
        save_one(second, 1, SMALL, layout, 1)
        save_one(first, 1, SMALL, layout, 0)
        assert first.wait()[0].ok
        assert second.wait()[0].ok
    assert {key.split("/")[1] for key in open_storage(tmp_path).list_keys()} == {"root.json", "a-0003"}
    assert_holds(tmp_path, 1, SMALL)


def test_tensors_that_no_rank_holds_whole_are_not_committed(tmp_path: Path) -> None:
    pieces = [piece for piece in pieces_of(SMALL, ONE, 0, values(SMALL)) if piece.name != "layers.1.attn.q.weight"]
    with Checkpointer(str(tmp_path), attempt="a") as checkpointer:
        checkpointer.save(1, pieces, tensors=SMALL, layout=ONE, num_layers=NUM_LAYERS, metadata={})
        assert "layers.1.attn.q.weight: 1,024 of 1,024 bytes are missing" in checkpointer.wait()[0].error
    assert committed_steps(open_storage(tmp_path)) == []


def test_pieces_that_do_not_fit_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    pieces = pieces_of(SMALL, ONE, 0, values(SMALL), lambda flat: flat[:-1])
    with Checkpointer(str(tmp_path), attempt="a") as checkpointer:
        with pytest.raises(UserError, match=r"norm\.weight: a piece of 64 bytes has memory of 60 bytes"):
            checkpointer.save(1, pieces[-1:], tensors=SMALL, layout=ONE, num_layers=NUM_LAYERS, metadata={})
        save_one(checkpointer, 2, SMALL)
        assert checkpointer.wait()[0].ok


def test_what_no_reader_would_take_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="rank 2 is not one of the 2 ranks"):
        Checkpointer(str(tmp_path), rank=2, world_size=2, attempt="a")
    with pytest.raises(UserError, match="names one step"):
        Checkpointer(f"{tmp_path}/step-000000001", attempt="a")
    with Checkpointer(str(tmp_path), attempt="a") as checkpointer:
        with pytest.raises(UserError, match="step -1 is not a whole number from 0"):
            save_one(checkpointer, -1, SMALL)
        with pytest.raises(UserError, match=r"no reader would take this checkpoint: w: dtype 'float32'"):
            checkpointer.prepare([], [TensorInfo("w", "float32", (), Placement("first"))])
        pieces = pieces_of(SMALL, ONE, 0, values(SMALL), lambda flat: flat.view(f"V{flat.itemsize}"))
        with pytest.raises(UserError, match="and a piece's memory is "):
            checkpointer.save(1, pieces, tensors=SMALL, layout=ONE, num_layers=NUM_LAYERS, metadata={})
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StorageError, match=r"cannot write .*/file/run: .*/file is not a folder"):
        Checkpointer(f"{tmp_path}/file/run", attempt="a")
    with pytest.raises(StorageError, match="cannot write /proc/run"):
        Checkpointer("/proc/run", attempt="a")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_closed_checkpointer_touches_no_file_of_others(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path), attempt="a") as checkpointer:
        save_one(checkpointer, 1, SMALL)
    for call in (
        lambda: save_one(checkpointer, 2, SMALL), lambda: checkpointer.prepare([], SMALL), checkpointer.copy_last,
    ):  # fmt: skip
        with pytest.raises(UserError, match="is closed"):
            call()
    assert checkpointer.wait() == []


def test_a_forked_process_leaves_the_writer_to_its_parent(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path), attempt="a") as checkpointer:
        save_one(checkpointer, 1, SMALL)
        child = os.fork()
        if not child:
            try:
                save_one(checkpointer, 2, SMALL)
            except UserError as error:
                os._exit(0 if "is another process's" in str(error) and checkpointer.close() == [] else 2)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert [report.ok for report in checkpointer.wait()] == [True]


@pytest.mark.parametrize(
    "settings",
    [
        {"deadline_s": -1}, {"timeout_s": float("nan")}, {"retry_s": "x"}, {"max_failed_saves": 0}, {"num_threads": 0},
        {"window_bytes": -1}, {"window_bytes": 1.5}, {"when_busy": "skipp"}, {"retention": None},
    ],
)  # fmt: skip
def test_options_that_cannot_be_are_refused(settings: dict[str, Any]) -> None:
    [(name, value)] = settings.items()
    with pytest.raises(UserError, match=re.escape(f"{name} {value!r} is no")):
        CheckpointerOptions(**settings)


def test_a_shortage_of_memory_at_the_start_is_told_with_a_way_out(tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpointer(str(tmp_path), attempt="a") as checkpointer:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
        try:
            with pytest.raises(
                StorageError, match=r"no memory to stage saves of 9[0-9],[0-9]{3} bytes: File too"
            ) as told:
                checkpointer.prepare(pieces_of(SMALL, ONE, 0), SMALL)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        assert told.value.hint


def test_a_shortage_of_memory_fails_one_save_and_no_more(tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpointer(str(tmp_path), attempt="a") as checkpointer:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))  # bounds the arena's memfd too
        try:
            save_one(checkpointer, 1, SMALL)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        assert checkpointer.wait()[0].error == "rank 0: no memory to stage step 1: File too large"
        save_one(checkpointer, 2, SMALL)
        assert checkpointer.wait()[0].ok
        larger = gpt_tensors(hidden=256, ffn=1024, vocab=5000)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, limit[1]))
        try:
            save_one(checkpointer, 3, larger)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        assert "no memory to stage step 3" in checkpointer.wait()[0].error
        save_one(checkpointer, 4, SMALL)  # there is memory for that, as before
        assert checkpointer.wait()[0].ok
    assert committed_steps(open_storage(tmp_path)) == [2, 4]
    assert_holds(tmp_path, 4, SMALL)


def test_too_many_failures_in_a_row_end_the_run(tmp_path: Path) -> None:
    run, options = tmp_path / "run", CheckpointerOptions(max_failed_saves=2)
    with Checkpointer(str(run), attempt="a", options=options) as checkpointer:
        run.rmdir()
        run.write_bytes(b"")
        save_one(checkpointer, 1, SMALL)
        save_one(checkpointer, 2, SMALL)
        with pytest.raises(StorageError, match="2 saves in a row failed, the last: cannot"):
            save_one(checkpointer, 3, SMALL)
        assert len(checkpointer.poll()) == 2


def test_what_cannot_be_ordered_leaves_nobody_waiting(tmp_path: Path) -> None:
    pieces = pieces_of(SMALL, ONE, 0, values(SMALL))
    with Checkpointer(str(tmp_path), attempt="a") as checkpointer:
        with pytest.raises(UserError, match="None is not a ParallelLayout"):
            checkpointer.save(1, pieces, tensors=SMALL, layout=None, num_layers=NUM_LAYERS, metadata={})  # type: ignore[arg-type]
        assert not checkpointer.is_busy
        save_one(checkpointer, 2, SMALL)
        assert checkpointer.wait()[0].ok


def test_closing_after_a_failed_copy_of_the_state_ends_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a device is gone")

    checkpointer = Checkpointer(str(tmp_path), attempt="a")
    writer = checkpointer.writer_pid
    pieces = pieces_of(SMALL, ONE, 0, values(SMALL))
    monkeypatch.setattr(Staging, "_copy", fail)
    checkpointer.save(1, pieces, tensors=SMALL, layout=ONE, num_layers=NUM_LAYERS, metadata={}, overlap=True)
    with pytest.raises(RuntimeError, match="a device is gone"):
        checkpointer.close()
    assert not is_running(writer)
    assert committed_steps(open_storage(tmp_path)) == []


@pytest.mark.ci
def test_older_steps_go_after_a_newer_commit(url: str) -> None:
    options = CheckpointerOptions(retention=Retention(keep_last=2))
    with Checkpointer(url, attempt="a", options=options) as checkpointer:
        for step in (1, 2, 3, 4):
            save_one(checkpointer, step, SMALL, scale=step)
        assert all(report.ok for report in checkpointer.wait())
    storage = open_storage(url)
    assert committed_steps(storage) == [3, 4]
    assert {item.key.split("/")[0] for item in storage.list()} == {"step-000000003", "step-000000004"}
    assert_holds(url, 3, SMALL, scale=3)


def test_a_storage_without_exclusive_writes_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Checkpointer(f"local://{tmp_path}", attempt="a").close()
    assert f"warning: local://{tmp_path} cannot commit exclusively" in capsys.readouterr().err


def test_memory_that_the_writer_alone_would_see_is_refused(tmp_path: Path) -> None:
    for url, tiers in (("memory://run", ()), (str(tmp_path), (Tier("memory://run"),))):
        with pytest.raises(UserError, match="memory://run is lost with the process") as caught:
            Checkpointer(url, attempt="a", options=CheckpointerOptions(tiers=tiers))
        assert caught.value.hint == "/dev/shm/run is memory that stays"


def test_a_save_needs_no_room_in_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for name in ("TemporaryFile", "NamedTemporaryFile", "mkstemp", "mkdtemp"):
        monkeypatch.setattr(tempfile, name, full)
    assert save_whole(tmp_path / "run", 1, SMALL).ok
