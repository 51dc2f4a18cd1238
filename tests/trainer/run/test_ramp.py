"""A batch that grows: the steps of a run, also where it resumes among them, and what cannot grow so."""

from pathlib import Path

import pytest

from tests.trainer.support.training import Job, call, curve, lines
from trainer.config import Config, DataConfig, TrainConfig
from trainer.config.resolve import batch_sizes

Capture = pytest.CaptureFixture[str]
RAMP = ("--rampup-batch-size", 4, 4, 40)
SIZES = [4, 4, 4, 4, 8, 8, 12, 16, 16]
WATCHED = ("loss", "grad_norm", "lr", "tokens")


def train(config: Path, folder: Path, name: str, *flags: object) -> int:
    flags = ("--log.interval", 1, "--optim.decay-steps", len(SIZES), *flags)
    return call("train", config, "--metrics", folder / f"{name}.jsonl", "--save", folder / name, *flags)


def test_a_resume_has_the_steps_that_it_would_have_had(job_config: Path, tmp_path: Path, capsys: Capture) -> None:
    """Stopped among the steps of the first size, and behind those of the second."""
    assert train(job_config, tmp_path, "whole", *RAMP, "--train-steps", 9) == 0
    tokens = list(curve(tmp_path / "whole.jsonl", "tokens").values())
    assert tokens == [32 * sum(SIZES[:step]) for step in range(1, 10)]
    for last in (2, 6, 9):
        assert train(job_config, tmp_path, "cut", *RAMP, "--train-steps", last) == 0
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    assert all(curve(whole, key) == curve(cut, key) for key in WATCHED)
    assert [(line["step"], line["batch_size"]) for line in lines(cut, "batch_size")] == [(5, 8), (7, 12), (8, 16)]
    said = capsys.readouterr().err
    assert "step     4 to 16 samples of 32 = 128 to 512 tokens; 9 steps = 2,432 tokens" in said
    assert "2 to 8 micro-batches of a rank, 16 samples from step 8 on" in said
    assert "step 7: 12 samples a step, was 8" in said
    assert "not bit for bit" not in said

    assert train(job_config, tmp_path, "cut", "--rampup-batch-size", 8, 4, 40, "--train-steps", 10) == 0
    assert "train.rampup_batch_size (4, 4, 40) -> (8, 4, 40)" in capsys.readouterr().err


def test_the_dry_run_says_which_steps_its_figures_are_of(job_config: Path, capsys: Capture) -> None:
    assert call("train", job_config, *RAMP, "--pp", 2, "--dry-run") == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "22.6% of a step (29.4% with the 2 micro-batches of the first steps) by the arithmetic of" in said
    assert call("plan", job_config, *RAMP, "--gpus", 2, "--fixed", "--dp", 2) in (0, 1)
    assert "steps grow from 4 to 16 samples: these are figures of the last ones" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            (6, 2, 40, "--micro-batch-size", 2, "--dp", 2),
            "has a step of 6 samples, which is not a multiple of micro_batch_size 2 * dp 2 = 4: START INCR may be "
            "4 4, 4 12, 8 4, 8 8, 12 4: --rampup-batch-size 4 4 40",
        ),
        ((8, 4, 40, "--micro-batch-size", 8), "START INCR may be 8 8: --rampup-batch-size 8 8 40"),
        ((8, 4, 40, "--micro-batch-size", 16), "no size below global_batch_size 16 is: leave"),
        ((16, 4, 40), "START 16 has to be below the last size, 16"),
        ((4, 5, 40), "INCR 5 lead from START 4 past 16: 1, 2, 3, 4, 6, 12 do not"),
        ((4, 4, 0), "train.rampup_batch_size: must be at least 1, got '4'"),
    ],
)
def test_what_cannot_grow_is_refused(job_config: Path, capsys: Capture, flags: tuple, text: str) -> None:
    assert call("train", job_config, "--dry-run", "--rampup-batch-size", *flags) == 2
    assert text in capsys.readouterr().err


def test_samples_that_another_program_read_count() -> None:
    train = TrainConfig(global_batch_size=16, rampup_batch_size=(4, 4, 40))
    sizes = batch_sizes(Config(train=train, data=DataConfig(order="megatron", start_sample=30)))
    assert [sizes.at(sample) for sample in (0, 9, 10)] == [12, 12, 16]


@pytest.mark.slow
@pytest.mark.ci
def test_ranks_that_are_killed_go_on_with_the_steps_of_their_size(job_config: Path, tmp_path: Path) -> None:
    def job(name: str) -> Job:
        words = (*RAMP, "--dp", 2, "--save", tmp_path / name, "--save-interval", 1, "--train-steps", 9)
        return Job(2, job_config, *words, metrics=tmp_path / f"{name}.jsonl")

    job("whole").run()
    for step in (2, 5):
        job("cut").run_until_step(step)
    job("cut").run()
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    assert all(curve(whole, key) == curve(cut, key) for key in WATCHED)
    assert call("eval", tmp_path / "cut", "--micro-batch-size", 16) == 0, "which the first steps do not have"
