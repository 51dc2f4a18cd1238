"""Saves beside the next step, and saves that take longer than the interval between them."""

from pathlib import Path

import pytest

from ckptkit.runs.catalogue import committed_steps
from tests.trainer.support.training import Job, call, curve, hash_of, lines
from threefold.storage import open_storage
from tools.fault_proxy import Fault, FaultProxy
from trainer.checkpoint.progress import Progress, Resumed
from trainer.run import loop as training


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_overlapped_saves_hold_what_blocking_ones_hold(job_config: Path, tmp_path: Path, precision: str) -> None:
    runs = {"auto": ["--checkpoint.window-mib", 16], "off": [], "on": []}
    for overlap, more in runs.items():
        flags = ["--train-steps", 3, "--save-interval", 1, "--train.precision", precision, "--metrics"]
        flags += [tmp_path / f"{overlap}.jsonl", "--checkpoint.overlap", overlap, *more]
        assert call("train", job_config, "--save", tmp_path / overlap, *flags) == 0
        assert committed_steps(open_storage(tmp_path / overlap)) == [1, 2, 3]
    for step in range(1, 4):
        hashes = [hash_of(tmp_path / overlap, step) for overlap in runs]
        assert hashes[0] == hashes[1] == hashes[2]
    saves = lines(tmp_path / "on.jsonl", "save")
    assert [save["counts"] for save in saves] == [{"ok": n, "failed": 0, "skipped": 0} for n in range(1, 4)]
    stalls = curve(tmp_path / "on.jsonl", "checkpoint_stall_s")
    assert all(stalls[step] > 0 for step in (2, 3))  # the line after a save has what it cost


def test_a_step_that_another_run_saved_meanwhile_is_told(
    job_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--save", tmp_path / "run", "--train-steps", 1, "--save-interval", 1]
    assert call("train", job_config, *flags) == 0
    # as if both had begun at once
    monkeypatch.setattr(training, "resume", lambda ranks, engine, config, tiers: Resumed(Progress(), config))
    capsys.readouterr()
    assert call("train", job_config, *flags) == 0
    told = capsys.readouterr().err
    assert f"warning: step 1 is in {tmp_path}/run, perhaps of an earlier start, or of another run" in told
    assert "is committed already" in told


def test_the_clock_asks_for_saves_and_starts_again_with_each(job_config: Path, tmp_path: Path) -> None:
    flags = ["--save", tmp_path / "run", "--metrics", tmp_path / "m.jsonl", "--save-interval-s"]
    assert call("train", job_config, *flags, 1e-6, "--train-steps", 4) == 0
    assert [save["step"] for save in lines(tmp_path / "m.jsonl", "save")] == [1, 2, 3, 4]  # each once
    assert call("train", job_config, *flags, 600, "--train-steps", 6, "--save-interval", 5) == 0
    assert committed_steps(open_storage(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]
    assert call("train", job_config, *flags, 600, "--train-steps", 8) == 0  # resumed: the clock has just started
    assert committed_steps(open_storage(tmp_path / "run")) == [1, 2, 3, 4, 5, 6, 8]


@pytest.mark.slow
def test_all_ranks_save_when_the_clock_of_the_first_asks(job_config: Path, tmp_path: Path) -> None:
    flags = ["--pp", 2, "--save", tmp_path / "run", "--save-interval-s", 1e-6, "--train-steps", 4]
    output = Job(2, job_config, *flags, metrics=tmp_path / "m.jsonl").run()
    assert committed_steps(open_storage(tmp_path / "run")) == [1, 2, 3, 4]
    assert [output.count(f"step {step} is saved: ") for step in range(1, 5)] == [1, 1, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("when_busy", ["skip", "abort"])
def test_a_slow_storage_costs_saves_and_no_steps(
    job_config: Path, tmp_path: Path, s3_proxy: FaultProxy, s3_url: str, when_busy: str, num_ranks: int
) -> None:
    s3_proxy.fault = Fault("delay", method="PUT", delay_s=8.0, times=1)
    arguments = [job_config, "--save", s3_url, "--train-steps", 4, "--save-interval", 1, "--checkpoint.when-busy"]
    arguments += [when_busy, "--checkpoint.max-failed-saves", 100]
    if num_ranks == 1:
        assert call("train", *arguments, "--metrics", tmp_path / "m.jsonl") == 0
    else:
        Job(num_ranks, *arguments, metrics=tmp_path / "m.jsonl").run()
    assert list(curve(tmp_path / "m.jsonl")) == [1, 2, 3, 4]
    committed, saves = committed_steps(open_storage(s3_url)), lines(tmp_path / "m.jsonl", "save")
    assert 4 in committed
    assert [save["step"] for save in saves if save["ok"]] == committed
    word = {"skip": "skipped: a save before it still runs", "abort": "was given up when step"}[when_busy]
    left_out = [save["step"] for save in saves if word in save.get("error", "")]
    assert set(left_out) | set(committed) == {1, 2, 3, 4}
    how = {"skip": "skipped", "abort": "failed"}[when_busy]
    expected = {"ok": len(committed), "failed": 0, "skipped": 0} | {how: len(left_out)}
    assert len(left_out) > 0
    assert saves[-1]["counts"] == expected
