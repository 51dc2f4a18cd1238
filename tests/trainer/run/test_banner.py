"""What a run says of itself at its start, and of what it keeps."""

from pathlib import Path

import pytest
import torch

from tests.trainer.support.training import call
from threefold.version import __version__
from trainer.config.resolve import tiers_of
from trainer.config.walk import config_from
from trainer.run.banner import kept, weights_text, windows_text


def test_a_run_says_what_it_is_and_where_it_saves(
    job_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [job_config, "--save", "run", "--save-interval", 2]
    assert call("train", *arguments, "--train-steps", 2) == 0
    text = capsys.readouterr().err
    for fact in (
        f"trainer  {__version__}\n"
        "model    27,168 parameters: 3 layers of 32, 4 heads (2 of keys and values), swiglu of 48",
        "\n         positions, 61 tokens\n",
        "layout   tp 1 x pp 1 x dp 1 = 1 rank, ZeRO stage 1\n",
        "step     16 samples of 32 = 512 tokens; 2 steps = 1,024 tokens\n",
        "data     21,920 tokens in ",
        "device   CPU, 1 thread a rank, fp32\n",
        "save     run every 2 steps and at the end; all steps stay\n",
        "nothing is there to resume: starts at step 0\n",
        "step 2 is saved: 0.3 MB, ",
    ):
        assert fact in text
    assert all(len(line) <= 100 for line in text.splitlines() if str(job_config.parent) not in line)
    assert call("train", *arguments, "--train-steps", 3) == 0
    text = capsys.readouterr().err
    assert text.index("save     ") < text.index("resumed from step 2 of run\n")
    assert text.count("is saved: ") == 1
    assert call("train", job_config, "--train-steps", 1) == 0
    text = capsys.readouterr().err
    assert "save     nowhere: nothing of this run will be kept (--save URL keeps it)\n" in text
    assert "resume" not in text


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        ({}, []),
        ({"window": 8}, ["queries of 3 layers see 8 tokens"]),
        ({"window": 8, "window_every": 3}, ["queries of 2 layers see 8 tokens, 1 of them all"]),
        ({"window": 31, "window_every": 9}, ["queries of 3 layers see 31 tokens"]),
        ({"window": 2048}, ["a window of 2,048 cuts nothing of rows of 32 tokens: all layers see all of them"]),
    ],
)
def test_what_a_window_cuts_is_said(window: dict, expected: list) -> None:
    model = {"num_layers": 3, **window}
    assert list(windows_text(config_from({"model": model, "train": {"seq_length": 32}}, source=""))) == expected


def test_what_dropped_weights_cost_on_a_gpu_is_said() -> None:
    config = config_from({"model": {"attention_dropout": 0.25}, "train": {"seq_length": 32}}, source="")
    [text] = weights_text(config, torch.device("cuda"))
    assert text.startswith("0.25 of the weights are dropped by the backend reference: plain torch")
    assert not list(weights_text(config, torch.device("cpu")))
    config = config_from({"model": {"position": "alibi"}, "train": {"seq_length": 32}}, source="")
    [text] = weights_text(config, torch.device("cuda"))
    assert text.startswith("ALiBi by the backend flash-2 if flash-attn is installed, else by reference: plain torch")
    assert not list(weights_text(config_from({"train": {"seq_length": 32}}, source=""), torch.device("cuda")))


@pytest.mark.parametrize(
    ("save", "expected"),
    [
        ({"save": "a"}, [("save", "a every 600 s and at the end; all steps stay")]),
        ({"save": "a", "save_interval_s": 0}, [("save", "a at the end; all steps stay")]),
        (
            {"save": ["a", "b,every=4,keep_best=2,metric=loss", "c"], "save_interval": 1, "save_interval_s": 90},
            [
                ("save", "a every step and every 90 s and at the end; all steps stay"),
                ("copy", "b every 4 steps; the best 2 by loss stay"),
                ("copy", "c every save; all steps stay"),
            ],
        ),
        (
            {"save": "a", "keep_last": 3, "keep_every": 100, "keep_hourly": 5},
            [
                (
                    "save",
                    "a every 600 s and at the end; the newest 3, one every 100 steps, one of each of the last 5 hours "
                    "stay",
                )
            ],
        ),
    ],
)
def test_what_is_kept_is_said_of_each_place(save: dict, expected: list) -> None:
    config = config_from({"checkpoint": save}, source="")
    assert kept(tiers_of(config), config.checkpoint) == expected
