"""A run whose pipeline ranks hold several stages is saved, hashed, resharded and resumed like any other."""

from pathlib import Path
from typing import Any

import pytest

from ckptkit.cli import main as ckptkit
from ckptkit.loading.roots import read_root
from tests.trainer.support.training import Job, call, curve
from threefold.storage import open_storage

MODEL = ["--model.num-layers", 7, "--model.tie-embeddings", "true", "--train.precision", "fp64"]
STEPS = ["--optim.decay-steps", 6, "--save-interval", 2]


def command(*arguments: object) -> None:
    assert ckptkit([*map(str, arguments)]) == 0


def hashes(capsys: pytest.CaptureFixture[str], where: Path) -> list[str]:
    capsys.readouterr()
    command("hash", where)
    return capsys.readouterr().out.splitlines()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_other_stages_go_on_with_it(job_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def job(name: str, last: int, *flags: object, load: Path | None = None) -> dict[int, float]:
        source: list[Any] = ["--load", load] if load else []
        arguments = [job_config, *MODEL, *STEPS, "--train-steps", last, "--save", tmp_path / name, *source, *flags]
        metrics = tmp_path / f"{name}.jsonl"
        pp = flags[flags.index("--pp") + 1] if "--pp" in flags else 1
        if pp == 1:
            assert call("train", *arguments, "--metrics", metrics) == 0
        else:
            Job(int(pp), *arguments, metrics=metrics).run()
        return curve(metrics)

    whole = job("whole", 6)
    job("first", 2, "--pp", 2, "--vpp", 3, "--schedule", "zb-h1")
    step = tmp_path / "first" / "step-000000002"
    assert str(read_root(open_storage(tmp_path / "first"), 2).layout) == "pp2-virtual3"
    saved = hashes(capsys, step)
    command("verify", step)
    for number, flags in enumerate((["--pp", 2], ["--pp", 3, "--virtual", 2], ["--tp", 2, "--dp", 2])):
        other = tmp_path / f"resharded-{number}"
        command("reshard", step, other, *flags)
        assert hashes(capsys, other) == saved
        command("verify", other)
    back = tmp_path / "back"
    command("reshard", tmp_path / "resharded-2", back, "--pp", 2, "--virtual", 3)
    assert hashes(capsys, back) == saved
    # in place with other stages on as many ranks, from a seed on one rank, and from a reshard on three
    runs = [
        job("first", 4, "--pp", 2, "--vpp", 2, "--pipeline-layout", "3,1,2,1"),
        job("alone", 4, load=step),
        job("three", 4, "--pp", 3, "--vpp", 2, "--pipeline-layout", "cost", load=tmp_path / "resharded-1"),
    ]
    newest = tmp_path / "first" / "step-000000004"
    command("verify", newest)
    command("reshard", newest, tmp_path / "last", "--pp", 2)
    assert hashes(capsys, tmp_path / "last") == hashes(capsys, newest) != saved
    recorded = read_root(open_storage(tmp_path / "three"), 4).metadata["config"]["parallel"]["pipeline_layout"]
    assert sum(map(int, recorded.split(","))) == 7
    for found in runs:
        for number, loss in found.items():
            assert loss == pytest.approx(whole[number], rel=1e-10)
        assert max(found) == 4
