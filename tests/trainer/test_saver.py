"""Saves beside the next step, and saves that take longer than the interval between them."""

import json
from pathlib import Path

import pytest

from ckptkit.cli import main as ckptkit
from ckptkit.runs.catalogue import committed_steps
from tests.trainer.training import Job, call, curve, lines
from threefold.storage import open_storage
from tools.fault_proxy import Fault, FaultProxy


def content(url: object, step: int, capsys: pytest.CaptureFixture[str]) -> str:
    """The hash of all tensors of a step."""
    capsys.readouterr()
    assert ckptkit(["hash", f"{url}/step-{step:09d}", "--json"]) == 0
    return json.loads(capsys.readouterr().out)["all"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_overlapped_saves_hold_what_blocking_ones_hold(
    job_config: Path, tmp_path: Path, precision: str, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = {"auto": ["--checkpoint.window-mib", 16], "off": [], "on": []}
    for overlap, more in runs.items():
        flags = ["--train-steps", 5, "--save-interval", 1, "--train.precision", precision, "--metrics"]
        flags += [tmp_path / f"{overlap}.jsonl", "--checkpoint.overlap", overlap, *more]
        assert call("train", job_config, "--save", tmp_path / overlap, *flags) == 0
        assert committed_steps(open_storage(tmp_path / overlap)) == [1, 2, 3, 4, 5]
    for step in range(1, 6):
        assert len({content(tmp_path / overlap, step, capsys) for overlap in runs}) == 1
    saves = lines(tmp_path / "on.jsonl", "save")
    assert [save["counts"] for save in saves] == [{"ok": n, "failed": 0, "skipped": 0} for n in range(1, 6)]
    stalls = curve(tmp_path / "on.jsonl", "checkpoint_stall_s")
    assert all(stalls[step] > 0 for step in range(1, 6))


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("when_busy", ["skip", "abort"])
def test_a_slow_storage_costs_saves_and_no_steps(
    job_config: Path, tmp_path: Path, s3_proxy: FaultProxy, s3_url: str, when_busy: str, num_ranks: int
) -> None:
    s3_proxy.fault = Fault("delay", method="PUT", delay_s=0.5)
    arguments = [job_config, "--save", s3_url, "--train-steps", 6, "--save-interval", 1, "--checkpoint.when-busy"]
    arguments += [when_busy, "--checkpoint.max-failed-saves", 100]
    Job(num_ranks, *arguments, metrics=tmp_path / "m.jsonl").run()
    assert list(curve(tmp_path / "m.jsonl")) == [1, 2, 3, 4, 5, 6]
    saves = {line["step"]: line for line in lines(tmp_path / "m.jsonl", "save")}
    assert sorted(saves) == [1, 2, 3, 4, 5, 6]
    committed = committed_steps(open_storage(s3_url))
    assert 6 in committed
    assert [step for step, save in sorted(saves.items()) if save["ok"]] == committed
    counts = max((save["counts"] for save in saves.values()), key=lambda counts: sum(counts.values()))
    assert counts["ok"] == len(committed) < 6
    assert counts["skipped" if when_busy == "skip" else "failed"] == 6 - len(committed)
    words = {"skip": "skipped: a save before it still runs", "abort": "was given up when step"}
    assert any(words[when_busy] in save.get("error", "") for save in saves.values())
