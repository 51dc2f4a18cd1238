"""A first step that takes minutes on a CPU says so before it and after each micro-batch; another one is silent."""

import re
from pathlib import Path

import pytest

from tests.trainer.support.training import call, curve
from trainer.run import first_step


@pytest.mark.parametrize(("slow_s", "num_lines"), [(0.0, 9), (3600.0, 0)])
def test_a_slow_first_step_is_estimated_and_each_microbatch_reported(
    slow_s: float, num_lines: int, job_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setitem(first_step.FirstStep.__init__.__kwdefaults__, "slow_s", slow_s)
    flags = ["--train-steps", 2, "--metrics", tmp_path / "m.jsonl"]
    assert call("train", job_config, *flags, "--train.peak-tflops", 0.5) == 0
    said = capsys.readouterr().err
    assert len(re.findall(r"a step (?:is|takes) .*\d:\d\d:\d\d", said)) == num_lines
    assert said.count("micro-batch 8 of 8 after") == bool(num_lines)
    assert said.find("micro-batch") < said.index("step 1/2")
    assert 0 < min(curve(tmp_path / "m.jsonl", "mfu").values()) < 1


def test_an_estimate_follows_the_speed_of_a_product() -> None:
    import torch

    assert 1e8 < first_step.product_flops_per_s(torch.float32) < 1e15
    assert first_step.shown(125.4) == "0:02:05"
