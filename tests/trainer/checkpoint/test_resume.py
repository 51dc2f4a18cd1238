"""What a run records in the roots that it saves, and which steps it keeps."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit.check.stats import tensor_statistics
from ckptkit.loading.reader import CheckpointReader
from ckptkit.loading.roots import read_root
from ckptkit.runs.catalogue import committed_steps
from tests.trainer.support.training import call, hash_of, lines
from threefold.storage import open_storage


def metadata(run: Path, step: int) -> dict[str, Any]:
    return dict(read_root(open_storage(run), step).metadata)


@pytest.fixture(scope="module")
def whole(job_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of six steps, saved every two and evaluated every three."""
    folder = tmp_path_factory.mktemp("recorded")
    torch.set_num_threads(1)  # as in each test
    train(job_config, folder, 6)
    return folder


def train(config: Path, folder: Path, num_steps: int, *flags: object) -> None:
    code = call(
        "train", config, "--train-steps", num_steps, "--optim.decay-steps", 9, "--save", folder / "run",
        "--save-interval", 2, "--train.eval-interval", 3, "--metrics", folder / "m.jsonl", *flags,
    )  # fmt: skip
    assert code == 0


@pytest.mark.slow
def test_a_run_that_is_loaded_from_itself_begins_and_goes_on(tmp_path: Path, job_config: Path) -> None:
    for num_steps in (2, 4):
        train(job_config, tmp_path, num_steps, "--load", f"{tmp_path}/run/")
    assert committed_steps(open_storage(tmp_path / "run")) == [2, 4]


def test_a_root_records_losses_lr_tokens_and_cursor(whole: Path) -> None:
    steps = {line["step"]: line for line in lines(whole / "m.jsonl")}
    saved = {step: metadata(whole / "run", step) for step in (2, 4, 6)}
    for step, recorded in saved.items():
        for key in ("loss", "lr", "tokens"):
            assert recorded[key] == steps[step][key]
        assert recorded["config"]["optim"]["decay_steps"] == 9
    assert len({recorded["cursor_digest"] for recorded in saved.values()}) == 3
    assert all(len(recorded["cursor_digest"]) == 16 for recorded in saved.values())


def test_a_validation_loss_is_recorded_by_the_first_save_after_it(whole: Path) -> None:
    losses = {line["step"]: line["loss"] for line in lines(whole / "m.jsonl", "eval")}
    assert list(losses) == [3, 6]
    assert "val_loss" not in metadata(whole / "run", 2)
    for saved_at, measured_at in ((4, 3), (6, 6)):
        recorded = metadata(whole / "run", saved_at)
        assert (recorded["val_step"], recorded["val_loss"]) == (measured_at, losses[measured_at])


def test_a_validation_loss_outlives_a_resume(whole: Path, job_config: Path, tmp_path: Path) -> None:
    train(job_config, tmp_path, 3)  # ends between two saves of the interval
    train(job_config, tmp_path, 6)
    assert committed_steps(open_storage(tmp_path / "run")) == [2, 3, 4, 6]
    for step in (2, 4, 6):
        resumed, uninterrupted = metadata(tmp_path / "run", step), metadata(whole / "run", step)
        for recorded in (resumed, uninterrupted):
            del recorded["config"]  # paths
        assert resumed == uninterrupted


def test_a_run_keeps_the_steps_that_its_rules_name(job_config: Path, tmp_path: Path) -> None:
    train(job_config, tmp_path, 8, "--checkpoint.keep-last", 1, "--checkpoint.keep-every", 4)
    assert committed_steps(open_storage(tmp_path / "run")) == [4, 8]
    assert all(save["ok"] for save in lines(tmp_path / "m.jsonl", "save"))


OF_EXPERTS = {"num-experts": 8, "experts-per-token": 2, "expert-ffn-hidden-size": 16, "moe-balance": "bias"}


def test_experts_and_their_biases_go_on_bit_for_bit(job_config: Path, tmp_path: Path) -> None:
    flags = [word for name, value in OF_EXPERTS.items() for word in (f"--model.{name}", value)]
    for folder, ends in (("whole", (3,)), ("resumed", (2, 3))):
        for num_steps in ends:
            train(job_config, tmp_path / folder, num_steps, *flags, "--model.moe-bias-rate", 0.05)
    runs = [tmp_path / folder / "run" for folder in ("whole", "resumed")]
    whole, resumed = ([(line["step"], line["loss"]) for line in lines(run.parent / "m.jsonl")] for run in runs)
    assert whole == resumed
    assert hash_of(runs[0], 3) == hash_of(runs[1], 3)
    with CheckpointReader(open_storage(runs[1]), 3) as reader:
        biases = tensor_statistics(reader, only=["*.router.expert_bias"])
    assert len(biases) == 3
    assert all(statistics.max for statistics in biases.values())
