"""How many rows of experts fit: by the plan, the same on all ranks, and said."""

import math

import pytest
import torch

from tests.trainer.support.moe import mixture
from trainer.job.ranks import Ranks
from trainer.parallel.rows import RowLimit
from trainer.run import expert_rows
from trainer.run.expert_rows import limit_rows, planned, rows_text, rows_that_fit

CONFIG = mixture("shared", "ep4-dp4", moe_rows=1.25)


def test_what_fits_is_planned_no_larger_than_the_device() -> None:
    most = planned(CONFIG, 4.0)
    assert rows_that_fit(CONFIG, most) == rows_that_fit(CONFIG, 0) == math.inf
    assert rows_that_fit(mixture("shared", "dp4"), 1) == math.inf, "without ep rows are as many as there are"
    for device_bytes in (planned(CONFIG, 1.25), planned(CONFIG, 2.5), most - 1):
        fits = rows_that_fit(CONFIG, device_bytes)
        assert planned(CONFIG, fits) <= device_bytes < planned(CONFIG, fits + 1 / 8)
    assert rows_that_fit(CONFIG, planned(CONFIG, 1.25) - 1) == 1.25, "a run that begins all the same is as it was"


def test_a_run_says_how_many_rows_fit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ranks, limit = Ranks("cpu", timeout_s=10), RowLimit(1.25, torch.device("cpu"))
    limit_rows(limit, CONFIG, ranks)
    assert (limit.fits, capsys.readouterr().err) == (math.inf, "")
    monkeypatch.setattr(expert_rows, "device_memory", lambda device: planned(CONFIG, 2.5))
    limit_rows(limit, CONFIG, ranks)
    text = "layers of experts with more than 2.5 times the mean rows are made again"
    assert limit.fits == 2.5
    assert text in capsys.readouterr().err
    assert rows_text(CONFIG, planned(CONFIG, 2.5)).endswith(f"to one rank's; {text}")
    assert rows_text(CONFIG, planned(CONFIG, 4.0)).endswith("to one rank's")
    limit.begin_step(1)
    for factor, is_crowded in ((2.5, False), (2.625, True)):
        limit.factor = factor
        assert limit.is_crowded == is_crowded
