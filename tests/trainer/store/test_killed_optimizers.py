"""A job of two ranks that is killed with SIGKILL goes on bit for bit, with each optimizer, and with streamed state."""

from pathlib import Path

import pytest

from tests.trainer.support.training import Job, curve, hash_of


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param("muon", ["--tp", 2], marks=pytest.mark.ci),
        *((name, ["--tp", 2]) for name in ("lion", "sgd")),
        pytest.param("adamw", ["--dp", 2, "--micro-batch-size", 1, "--grad-reduce", "int8"], marks=pytest.mark.ci),
    ],
)
def test_a_killed_run_has_the_bits_of_one_that_was_not(
    name: str, words: list[object], job_config: Path, tmp_path: Path
) -> None:
    flags = [job_config, *words, "--train-steps", 12, "--save-interval", 2, "--train.precision", "bf16"]
    jobs = {}
    for run in ("whole", "killed"):
        save = ["--optim.name", name, "--save", tmp_path / run]
        jobs[run] = Job(2, *flags, *save, metrics=tmp_path / f"{run}.jsonl")
    jobs["whole"].run()
    jobs["killed"].run_until_step(5)
    jobs["killed"].run()
    assert hash_of(tmp_path / "killed", 12) == hash_of(tmp_path / "whole", 12)
    losses = curve(tmp_path / "whole.jsonl")
    assert {step: loss for step, loss in curve(tmp_path / "killed.jsonl").items() if step > 6} == {
        step: loss for step, loss in losses.items() if step > 6
    }


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.timeout(600)
@pytest.mark.parametrize("master", ["wide", "split"])
def test_a_killed_run_that_streams_has_the_bits_of_one_that_does_not(
    master: str, job_config: Path, tmp_path: Path
) -> None:
    flags = [job_config, "--dp", 2, "--train-steps", 12, "--train.precision", "bf16", "--optim.master", master]
    whole = Job(2, *flags, "--save", tmp_path / "whole", metrics=tmp_path / "whole.jsonl")
    saves = ["--optimizer-offload", "--save", tmp_path / "killed", "--save-interval", 2]
    program = "tests.trainer.support.streaming_trainer"
    killed = Job(2, *flags, *saves, metrics=tmp_path / "killed.jsonl", program=program)
    whole.run()
    for step in (3, 7):
        killed.run_until_step(step)
    assert "streams" in killed.run()
    assert hash_of(tmp_path / "killed", 12) == hash_of(tmp_path / "whole", 12)
    losses = curve(tmp_path / "whole.jsonl")
    assert curve(tmp_path / "killed.jsonl").items() <= losses.items()
