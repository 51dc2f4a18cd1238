"""A run that goes from layout to layout, by `reshard` and by the load itself, trains as one process does."""

import math
from pathlib import Path

import pytest

from ckptkit.cli import main as ckptkit
from ckptkit.loading.roots import read_root
from tests.trainer.support.training import Job, call, curve
from threefold.storage import open_storage

MODEL = ["--model.num-layers", 5, "--train.precision", "fp64", "--optim.decay-steps", 10, "--save-interval", 2]
LEGS = {  # two steps each: the ZeRO stage, and the ranks of a shard group
    "tp2-dp2-pp2": (1, 0),
    "pp4": (0, 0),
    "cp2-dp2": (3, 1),
    "tp2": (1, 0),
    "cp4": (3, 0),
    "dp2-pp3": (3, 0),
    "dp4": (3, 2),
    "tp4-dp2": (2, 0),
    "tp2-cp2-pp2": (0, 0),
}


def axes(layout: str) -> dict[str, int]:
    return {"tp": 1, "cp": 1, "dp": 1, "pp": 1} | {part[:2]: int(part[2:]) for part in layout.split("-")}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("by_reshard", [True, False])
def test_the_losses_stay(
    job_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], by_reshard: bool
) -> None:
    metrics = tmp_path / "whole.jsonl"
    steps = ["--train-steps", 2 * len(LEGS)]
    assert call("train", job_config, *MODEL, *steps, "--save", tmp_path / "whole", "--metrics", metrics) == 0
    whole, run = curve(metrics), tmp_path / "run"
    for number, (layout, (zero_stage, dp_shard)) in enumerate(LEGS.items()):
        sizes = axes(layout)
        flags = [word for axis, size in sizes.items() if axis != "dp" for word in (f"--{axis}", size)]
        if by_reshard and number:
            next_run = tmp_path / f"run-{number}"
            cut = [str(word) for axis, size in sizes.items() for word in (f"--{axis}", size)]
            assert ckptkit(["reshard", str(run), str(next_run), *cut]) == 0
            assert ckptkit(["diff", str(run), str(next_run)]) == 0
            assert "equal to what was saved" in capsys.readouterr().out
            run = next_run
        metrics, last = tmp_path / f"{number}.jsonl", 2 * number + 2
        num_ranks = math.prod(sizes.values())
        Job(
            num_ranks, job_config, *MODEL, *flags, "--zero-stage", zero_stage, "--train-steps", last, "--save", run,
            *(("--parallel.zero-whole-kib", 0, "--dp-shard", dp_shard) if zero_stage > 1 else ()), metrics=metrics,
        ).run()  # fmt: skip
        root = read_root(open_storage(run), last)
        assert axes(str(root.layout)) == sizes
        losses = curve(metrics)
        assert list(losses) == [last - 1, last]
        for step, loss in losses.items():
            assert loss == pytest.approx(whole[step], rel=1e-10)
