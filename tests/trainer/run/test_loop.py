"""The same command, killed and started again, repeats an uninterrupted run; on another layout it stays close to it."""

import json
import signal
import time
from pathlib import Path

import pytest

from ckptkit.runs.catalogue import committed_steps
from tests.trainer.support.training import Job, call, curve, last_step, lines
from threefold.storage import open_storage
from trainer.job.ranks import Ranks
from trainer.job.whereabouts import STAGES

WATCHED = ("loss", "grad_norm", "lr", "tokens")


@pytest.fixture(scope="module")
def whole(job_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an uninterrupted run on TP2 x PP2: its metrics, its steps in `run`, its log."""
    folder = tmp_path_factory.mktemp("whole")
    job = Job(
        4, job_config, "--tp", 2, "--pp", 2, "--save", folder / "run", "--save-interval", 4, metrics=folder / "m.jsonl"
    )
    (folder / "log").write_text(job.run())
    return folder


@pytest.mark.ci
@pytest.mark.slow
def test_a_run_logs_and_saves(whole: Path) -> None:
    steps = lines(whole / "m.jsonl")
    assert [line["step"] for line in steps] == list(range(1, 13))
    assert steps[-1]["loss"] < 0.9 * steps[0]["loss"]
    assert steps[-1]["tokens"] == 12 * 16 * 32
    assert all(line["mfu"] is None and line["comm_s"] > 0 and line["bubble_s"] > 0 for line in steps)
    assert all(0 < line["comm_tp_s"] <= line["comm_s"] for line in steps)
    assert all(line["tokens_per_s_per_gpu"] * 4 == pytest.approx(line["tokens_per_s"]) for line in steps)
    assert all(0 < line["loss_tokens"] < 16 * 32 for line in steps)  # ends of documents are masked
    assert committed_steps(open_storage(whole / "run")) == [4, 8, 12]
    saves = lines(whole / "m.jsonl", "save")
    assert [(save["step"], save["ok"]) for save in saves] == [(4, True), (8, True), (12, True)]
    assert all(save["bytes"] == saves[0]["bytes"] > 0 for save in saves)
    assert "step 12/12  loss" in (whole / "log").read_text()


@pytest.mark.ci
@pytest.mark.slow
def test_killed_and_resumed_it_repeats_the_whole_run_bit_for_bit(whole: Path, job_config: Path, tmp_path: Path) -> None:
    job = Job(
        4, job_config, "--tp", 2, "--pp", 2, "--save", tmp_path / "run", "--save-interval", 4,
        metrics=tmp_path / "m.jsonl",
    )  # fmt: skip
    job.run_until_step(6)
    assert "resumed from step" in job.run()
    for key in WATCHED:
        assert curve(tmp_path / "m.jsonl", key) == curve(whole / "m.jsonl", key), key
    (resume,) = lines(tmp_path / "m.jsonl", "resume")
    assert resume["step"] in (4, 8)


@pytest.mark.ci
@pytest.mark.slow
def test_another_layout_continues_from_the_same_state(whole: Path, job_config: Path, tmp_path: Path) -> None:
    output = Job(
        4, job_config, "--pp", 2, "--save", tmp_path / "run", "--load", whole / "run" / "step-000000004",
        metrics=tmp_path / "m.jsonl",
    ).run()  # fmt: skip
    assert "not bit for bit as it was: parallel.tp 2 -> 1, parallel.dp 1 -> 2" in output
    resumed, reference = curve(tmp_path / "m.jsonl"), curve(whole / "m.jsonl")
    assert list(resumed) == list(range(5, 13))
    assert resumed == pytest.approx({step: reference[step] for step in resumed}, rel=1e-5)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.ci
@pytest.mark.slow
def test_a_signal_to_the_launcher_saves_and_ends_well(number: signal.Signals, job_config: Path, tmp_path: Path) -> None:
    job = Job(
        2, job_config, "--pp", 2, "--save", tmp_path / "run", "--train-steps", 100000, metrics=tmp_path / "m.jsonl"
    )
    process = job.start()
    while last_step(tmp_path / "m.jsonl") < 2 and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(number)
    _, output = job.outcome(process)
    last = last_step(tmp_path / "m.jsonl")
    assert output.count(f"stopped by {number.name} after step {last}") == 1
    assert committed_steps(open_storage(tmp_path / "run")) == [last]
    steps, saves = lines(job.metrics), lines(job.metrics, "save")
    assert [line["step"] for line in steps] == list(range(1, last + 1))
    assert all(line["mfu"] is None and line["comm_s"] > 0 and line["bubble_s"] > 0 for line in steps)
    assert [(save["step"], save["ok"]) for save in saves] == [(last, True)]


@pytest.mark.ci
@pytest.mark.slow
def test_damage_that_one_rank_finds_takes_all_ranks_back(whole: Path, job_config: Path, tmp_path: Path) -> None:
    arguments = (job_config, "--pp", 2, "--save", tmp_path / "run", "--save-interval", 4)
    Job(2, *arguments, metrics=tmp_path / "m.jsonl").run()
    (data,) = (tmp_path / "run" / "step-000000012").glob("*/part-00001.safetensors")
    content = bytearray(data.read_bytes())
    content[-8] ^= 1
    data.write_bytes(content)
    output = Job(2, *arguments, metrics=tmp_path / "m2.jsonl").run()
    assert "on rank" not in output  # they read together: each of them knows
    assert output.count(f"{data} is damaged between bytes ") == 1
    assert "falling back from step 12 to step 8" in output
    original = curve(tmp_path / "m.jsonl")
    assert curve(tmp_path / "m2.jsonl") == {step: original[step] for step in range(9, 13)}
    assert committed_steps(open_storage(tmp_path / "run")) == [4, 8, 12]  # saved anew
    assert (tmp_path / "run" / "step-000000012" / "damaged-root.json").exists()
    assert call("train", *arguments[:1], "--save", tmp_path / "run") == 0


@pytest.mark.slow
@pytest.mark.ci
def test_reading_late_changes_nothing_but_the_clock(
    job_config: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    runs = {}
    for name in ("at_once", "late"):
        if name == "late":
            request.getfixturevalue("reads_late")
        flags = ["--train-steps", 6, "--train.eval-interval", 3, "--save", tmp_path / name, "--save-interval", 2]
        assert call("train", job_config, *flags, "--metrics", tmp_path / f"{name}.jsonl") == 0
        found = [json.loads(text) for text in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        steps = [line for line in found if line.get("event") in (None, "eval")]
        runs[name] = [[line.get(key) for key in ("event", "step", "loss", "grad_norm", "tokens")] for line in steps]
        assert [each[1] for each in runs[name]] == [1, 2, 3, 3, 4, 5, 6, 6]
        assert all(line["step_s"] > 0 for line in lines(tmp_path / f"{name}.jsonl"))
    assert runs["late"] == runs["at_once"]
    assert committed_steps(open_storage(tmp_path / "late")) == [2, 4, 6]


@pytest.mark.parametrize("when", ["at once", "late"])
def test_each_stage_of_a_step_is_noted_in_its_order(
    when: str, job_config: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if when == "late":
        request.getfixturevalue("reads_late")
    noted: list[tuple[int, int]] = []

    def note(_: Ranks, step: int, stage: str) -> None:
        if stage in STAGES:  # what only this rank's page says is in between
            noted.append((step, STAGES.index(stage)))

    monkeypatch.setattr(Ranks, "note", note)
    flags = ["--train-steps", 4, "--train.eval-interval", 2, "--save", tmp_path / "run", "--save-interval", 2]
    assert call("train", job_config, *flags) == 0
    assert noted == sorted(noted)
    assert {stage for _, stage in noted} == set(range(len(STAGES)))
