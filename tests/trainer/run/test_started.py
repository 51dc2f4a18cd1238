"""Void steps of a run: what is logged, saved and read afterwards; faults of that are seen."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checks import Different, require_equal
from tests.trainer.support.training import call, curve, lines
from trainer import data
from trainer.engine import Engine
from trainer.run.loop import Run
from trainer.run.started import Intake
from trainer.verdict import Outcome

FLAGS = ("--train-steps", 5, "--optim.schedule", "constant", "--save-interval", 1, "--model.dropout", 0.1)


def plant(patch: pytest.MonkeyPatch, outcome: Outcome, *judged: int) -> None:
    """Make the steps that are judged first, second and so on void."""
    real, real_batch = Engine.__init__, data.to_device
    numbers = set(judged)

    def build(self: Engine, *arguments: Any, **options: Any) -> None:
        real(self, *arguments, **options)
        count = iter(range(1, 10**6))
        self.verdict.causes.append(lambda loss, norm: torch.full_like(loss, outcome if next(count) in numbers else 0))

    def copied(host: Any, device: Any) -> Any:  # as on a GPU, where a step has memory of its own
        return real_batch(replace(host, buffer=host.buffer.copy()), device)

    patch.setattr(Engine, "__init__", build)
    patch.setattr(data, "to_device", copied)


def train(config: Path, folder: Path, name: str, *flags: object) -> int:
    return call("train", config, "--save", folder / name, "--metrics", folder / f"{name}.jsonl", *FLAGS, *flags)


def metadata(run: Path, step: int) -> dict[str, Any]:
    return dict(json.loads((run / f"step-{step:09d}" / "root.json").read_text())["metadata"])


def compare_repeated(config: Path, folder: Path) -> None:
    """A run whose steps were repeated with one of which none was."""
    for name in ("loss", "lr", "tokens", "grad_norm"):
        found, expected = (curve(folder / f"{run}.jsonl", name) for run in ("void", "plain"))
        require_equal(found == expected, f"{name}: {found} in place of {expected}")
    for step in range(1, 6):
        found, expected = (metadata(folder / run, step) for run in ("void", "plain"))
        for key in ("cursor", "tokens", "updates", "loss"):
            require_equal(found[key] == expected[key], f"step {step}: {key}")


@pytest.mark.parametrize("late", [False, True])
def test_a_step_that_is_repeated_leaves_no_trace_but_an_event(
    job_config: Path, tmp_path: Path, request: pytest.FixtureRequest, *, late: bool
) -> None:
    assert train(job_config, tmp_path, "plain") == 0
    with pytest.MonkeyPatch.context() as patch:
        if late:
            request.getfixturevalue("reads_late")
        plant(patch, Outcome.REPEATED, 1, 4, 5)
        assert train(job_config, tmp_path, "void") == 0
    compare_repeated(job_config, tmp_path)
    found = [(line["step"], line["repeats"]) for line in lines(tmp_path / "void.jsonl", "void")]
    assert found[0] == (1, True)
    assert {repeats for _, repeats in found} == {True}


def test_the_last_step_is_repeated_too(job_config: Path, tmp_path: Path, reads_late: None) -> None:
    assert train(job_config, tmp_path, "plain", "--save-interval", 0) == 0
    with pytest.MonkeyPatch.context() as patch:
        plant(patch, Outcome.REPEATED, 5)
        assert train(job_config, tmp_path, "void", "--save-interval", 0) == 0
    assert curve(tmp_path / "void.jsonl", "loss") == curve(tmp_path / "plain.jsonl", "loss")


@pytest.mark.parametrize("late", [False, True])
def test_a_run_goes_on_after_a_void_step_and_resumes_with_its_updates(
    job_config: Path, tmp_path: Path, request: pytest.FixtureRequest, *, late: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if late:
            request.getfixturevalue("reads_late")
        plant(patch, Outcome.SKIPPED, 2)
        assert train(job_config, tmp_path, "whole") == 0
    with pytest.MonkeyPatch.context() as patch:
        plant(patch, Outcome.SKIPPED, 2)
        assert train(job_config, tmp_path, "parts", "--train-steps", 3) == 0
    assert train(job_config, tmp_path, "parts") == 0
    for run in ("whole", "parts"):
        assert [metadata(tmp_path / run, step)["updates"] for step in range(1, 6)] == [1, 1, 2, 3, 4]
        events = lines(tmp_path / f"{run}.jsonl", "void")
        assert [(line["step"], line["repeats"]) for line in events] == [(2, False)]
        assert [*curve(tmp_path / f"{run}.jsonl", "loss")] == [1, 2, 3, 4, 5]
    for name in ("loss", "grad_norm", "tokens"):
        assert curve(tmp_path / "whole.jsonl", name) == curve(tmp_path / "parts.jsonl", name)
    assert metadata(tmp_path / "whole", 5)["cursor"] == metadata(tmp_path / "parts", 5)["cursor"]


def test_a_step_that_is_void_again_and_again_ends_the_run(
    job_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(monkeypatch, Outcome.REPEATED, *range(2, 99))
    assert train(job_config, tmp_path, "void") == 2
    assert "step 2 was void 8 times" in capsys.readouterr().err
    assert metadata(tmp_path / "void", 1)["updates"] == 1


def moved_cursor(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Intake, "put_back", lambda self, step, taken: None)


def kept_progress(patch: pytest.MonkeyPatch) -> None:
    real = Run._go_back

    def go_back(self: Run, started: Any) -> None:
        kept = self.progress
        real(self, started)
        self.progress = kept

    patch.setattr(Run, "_go_back", go_back)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("a void step's cursor moved", moved_cursor),
        ("a void step counted in the progress", kept_progress),
    ],
)
def test_runs_with_void_steps_differ_if(name: str, fault: Any, job_config: Path, tmp_path: Path) -> None:
    assert train(job_config, tmp_path, "plain") == 0
    with pytest.MonkeyPatch.context() as patch:
        plant(patch, Outcome.REPEATED, 2)
        fault(patch)
        assert train(job_config, tmp_path, "void") == 0
    with pytest.raises(Different):
        compare_repeated(job_config, tmp_path)
