"""A run that cannot fit is refused before it starts, with what helps; one that fits is not."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from datakit import write_store
from tests.trainer.run.test_temporaries import Peak, config_of
from tests.trainer.support.training import call
from threefold.errors import UserError
from trainer.config.resolve import layout_of
from trainer.engine import Engine
from trainer.linear import weight
from trainer.mesh.mesh import mesh_of
from trainer.run import loop
from trainer.run.memory_check import Plan, best_ways, check_memory
from trainer.run.stage_times import Nobody, random_batch

Capture = pytest.CaptureFixture[str]
PRESET = Path(__file__).parents[3] / "examples" / "llama-3-8b.toml"
LAYOUTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"recompute": "selective"}, {"dp": 2}),
    ({"recompute": "full"}, {"dp": 2, "zero_stage": 3}),
    *(
        ({"recompute": recompute}, {"dp": 4, "zero_stage": stage})
        for stage in range(4)
        for recompute in ("none", "full")
    ),
    ({"micro_batch_size": 4, "global_batch_size": 8}, {"dp": 2}),
    ({"micro_batch_size": 1, "global_batch_size": 8}, {"dp": 8, "zero_stage": 3}),
    ({}, {"tp": 2}),
    ({"recompute": "selective", "recompute_modules": ["mlp"]}, {"tp": 2, "dp": 2, "zero_stage": 2}),
    ({"recompute": "full", "recompute_keep": "attention"}, {"tp": 2, "sequence_parallel": "off"}),
    ({"precision": "fp32"}, {"dp": 2, "zero_stage": 2}),
    ({"seq_length": 256}, {"dp": 2, "zero_stage": 3, "reshard_after_forward": "off"}),
    ({"recompute": "full", "recompute_num_layers": 1}, {}),
    ({"max_logits_gib": 0.0}, {"dp": 2}),
]
SLOW = [pytest.mark.slow, pytest.mark.ci]


@pytest.mark.parametrize(
    ("train", "parallel"), [pytest.param(*each, marks=SLOW * (number > 2)) for number, each in enumerate(LAYOUTS)]
)
def test_a_run_that_fits_is_not_refused(
    train: dict[str, Any], parallel: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Around the limit: with what its tensors take it begins, with an eighth less it is refused."""
    monkeypatch.setattr(weight, "add_product", lambda out, dy, x, first: out.zero_())
    config = config_of("llama", {"global_batch_size": 8, "seq_length": 128} | train, parallel, vocab_size=200)
    network = Nobody(layout_of(config).world_size)
    with Peak() as peak:
        engine = Engine(config, mesh_of(config, 0, torch.device("cpu"), network=network))
        engine.store.begin_step(0)
        batch = random_batch(engine)
        loss = engine.chunks[0].forward(None, batch)
        torch.autograd.backward(loss.sum())
    said: list[str] = []
    check_memory(config, peak.peak, said.append)
    assert len(said) <= 1  # it is near
    with pytest.raises(UserError, match="are missing; the largest: "):
        check_memory(config, peak.peak * 7 // 8, said.append)


@pytest.fixture
def command(tmp_path: Path) -> list[object]:
    """What follows the verb in a dry run of llama 3 8B on four GPUs."""
    write_store(tmp_path / "store", [[1, 2, 0]] * 4000, vocab_size=128256, eod_id=0)
    return [PRESET, "--data.stores", tmp_path / "store", "--dp", 4, "--dry-run"]


def planned_gib(printed: str) -> float:
    match = re.search(r"^memory .*?: ([\d.]+) GiB = ", printed, re.MULTILINE)
    assert match is not None, printed
    return float(match[1])


def test_what_helps_saves_what_is_said_when_it_is_typed(command: list[object], capsys: Capture) -> None:
    assert call("train", *command, "--device-memory", "79GiB") == 2
    printed = capsys.readouterr().err
    whole = planned_gib(printed)
    match = re.search(r"takes ([\d.]+) GiB by its plan, and its device has 79.0 GiB: ([\d.]+) GiB are missing", printed)
    assert match is not None, printed
    assert float(match[1]) == whole
    assert float(match[2]) == pytest.approx(whole - 79, abs=0.06)
    lines = re.findall(r"^  (--.+) saves ([\d.]+) GiB$", printed, re.MULTILINE)
    assert len(lines) == 3
    for flags, saved in lines:
        call("train", *command, *flags.split())
        assert whole - planned_gib(capsys.readouterr().err) == pytest.approx(float(saved), abs=0.11)  # each is rounded
    hint = printed.rpartition("hint: ")[2].split()
    assert call("train", *command, "--device-memory", "79GiB", *hint) == 0


def test_the_device_decides(command: list[object], capsys: Capture) -> None:
    assert call("train", *command, "--device-memory", "139GiB") == 0
    assert "fits     " in capsys.readouterr().err
    assert call("train", *command, "--device-memory", "79GiB", "--train.memory-check", "warn") == 0
    assert "warning: a rank takes" in capsys.readouterr().err
    assert call("train", *command, "--device-memory", "79GiB", "--train.memory-check", "off") == 0
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize("size", ["79", "79GB", "GiB", "0GiB", "-1GiB", "79gib"])
def test_a_size_that_is_none(command: list[object], size: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit, match="2"):
        call("train", *command, f"--device-memory={size}")
    assert "is not a size like 79GiB" in capsys.readouterr().err


def test_a_run_has_a_device_of_its_own(job_config: Path, capsys: Capture) -> None:
    assert call("train", job_config, "--device-memory", "1GiB") == 2
    assert "hint: --dry-run\n" in capsys.readouterr().err


def test_ways_are_of_different_kinds_and_the_largest_come_first() -> None:
    plan = Plan(config_of("llama", {"micro_batch_size": 4, "global_batch_size": 16}, {"dp": 2}, vocab_size=5000))
    ways = best_ways(plan, plan.total // 2)
    assert len({way.number for way in ways}) == len(ways) >= 5
    assert [way.plan.total for way in ways] == sorted(way.plan.total for way in ways)
    assert ways[0].plan.total < plan.total


def test_long_rows_are_cut_over_ranks_of_dp() -> None:
    plan = Plan(config_of("llama", {"seq_length": 4096, "global_batch_size": 8}, {"dp": 4}))
    [settings] = [way.settings for way in best_ways(plan, plan.total // 2) if "parallel.cp" in way.settings]
    assert settings["parallel.cp"] * settings["parallel.dp"] == 4


def test_a_number_of_micro_batches_that_is_set_by_hand_is_set_anew() -> None:
    sizes = {"seq_length": 512, "micro_batch_size": 4, "global_batch_size": 8, "gradient_accumulation_steps": 2}
    plan = Plan(config_of("llama", sizes, {}))
    ways = [way for way in best_ways(plan, 0) if "train.micro_batch_size" in way.settings]
    assert [str(way) for way in ways] == ["--micro-batch-size 1 --gradient-accumulation-steps 8"]


def test_a_run_is_refused_before_it_writes(
    job_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(loop, "device_memory", lambda _: 100 << 10)
    flags = ["--save", tmp_path / "run", "--metrics", tmp_path / "m.jsonl", "--train-steps", 1]
    assert call("train", job_config, *flags) == 2
    assert "its device has 100.0 KiB" in capsys.readouterr().err
    assert not (tmp_path / "m.jsonl").exists()
    assert call("train", job_config, *flags, "--train.memory-check", "off") == 0
