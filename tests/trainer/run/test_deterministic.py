"""Runs that repeat their bits: a resume takes the recorded attention; on GPUs, deterministic mode repeats all."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ckptkit import Run, hash_checkpoint
from ckptkit.check.hash import CheckpointHash
from tests.trainer.support.training import call, curve, write_config, write_stores
from trainer.model import op_choices


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_stores(tmp_path)
    write_config(tmp_path)
    return tmp_path


def arguments(folder: Path, run: str, start: str, num_steps: int) -> list[object]:
    flags = [folder / "job.toml", "--save", folder / run, "--metrics", folder / f"{start}.jsonl"]
    return [*flags, "--train-steps", num_steps, "--optim.decay-steps", 8]


def recorded(folder: Path, run: str, step: int) -> dict[str, str]:
    return Run(str(folder / run)).root(step).metadata["ops"]


def test_a_resume_takes_the_recorded_form_of_attention(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call("train", *arguments(folder, "run", "run", 2)) == 0
    assert recorded(folder, "run", 2) == {"attention": "sdpa-cpu"}
    with monkeypatch.context() as patch:
        patch.setattr(op_choices, "choose", lambda *_, **__: "reference")
        assert call("train", *arguments(folder, "other", "other", 2)) == 0
    assert call("train", *arguments(folder, "other", "other-again", 3)) == 0
    assert recorded(folder, "other", 2) == recorded(folder, "other", 3) == {"attention": "reference"}


def test_a_form_that_the_device_has_not_is_replaced_and_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(op_choices.OpChoices, "names", property(lambda _: {"attention": "sdpa-cudnn"}))
        assert call("train", *arguments(folder, "run", "run", 2)) == 0
    assert call("train", *arguments(folder, "run", "again", 3)) == 0
    assert "not bit for bit as it was: attention sdpa-cudnn -> sdpa-cpu" in capsys.readouterr().err
    assert recorded(folder, "run", 3) == {"attention": "sdpa-cpu"}


def hashes(folder: Path, step: int) -> list[CheckpointHash]:
    found = []
    for run in ("whole", "run"):
        with Run(str(folder / run)).open(step) as reader:
            found.append(hash_checkpoint(reader))
    return found


@pytest.mark.slow
@pytest.mark.ci
def test_split_masters_are_saved_whole_and_go_on_bit_for_bit(folder: Path) -> None:
    split = ["--bf16", "--optim.master", "split"]
    for run, start, num_steps in (("whole", "whole", 8), ("run", "first", 4), ("run", "second", 8)):
        assert call("train", *arguments(folder, run, start, num_steps), *split) == 0
    assert curve(folder / "whole.jsonl") == curve(folder / "first.jsonl") | curve(folder / "second.jsonl")
    first, second = hashes(folder, 8)
    assert first == second
    assert Run(str(folder / "run")).root(8).tensors["optim.master/embed.weight"].dtype == "F32"
    assert call("train", *arguments(folder, "run", "wide", 9), "--bf16") == 0
    assert list(curve(folder / "wide.jsonl")) == [9]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("master", ["wide", "split"])
def test_a_gpu_repeats_its_bits_after_a_resume(folder: Path, master: str) -> None:
    for run, start, num_steps in (("whole", "whole", 8), ("run", "first", 4), ("run", "second", 8)):
        flags = [*arguments(folder, run, start, num_steps), "--train.device", "cuda", "--bf16", "--deterministic"]
        flags += ["--optim.master", master]
        subprocess.run([sys.executable, "-m", "trainer", "train", *map(str, flags)], check=True)
    assert curve(folder / "whole.jsonl") == curve(folder / "first.jsonl") | curve(folder / "second.jsonl")
    first, second = hashes(folder, 8)
    assert first == second
