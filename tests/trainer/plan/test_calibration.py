"""A calibration: rates between places, its file, and plans that read it as they read a data sheet."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.printed import printed
from tests.trainer.support.calibrated import KERNEL_PARTS, calibration_of
from tests.trainer.support.option_walk import run_of
from threefold.errors import UserError
from trainer.cli import main
from trainer.plan.calibration import Calibration, PartRate, read_calibration
from trainer.plan.measured import BYTES_S, OPERATIONS_S, mixed, timed, working
from trainer.plan.probes import Probe, Scale, probes
from trainer.plan.rates import Rates
from trainer.plan.search import fixed_plan

Capture = pytest.CaptureFixture[str]
NETWORK: dict[str, Any] = {"network": 50e9, "node": 8}
TINY = Scale(
    hidden=(128,), tokens=(128,), few_tokens=128, vocab=256, lengths=(64,), heads=(16,), width=64, kernel_bytes=(8192,)
)


def calibration(*figures: PartRate) -> Calibration:
    return Calibration("some card", {}, 80e9, 1e-6, {"F": 1e-4, "B": 2e-4}, figures)


def test_between_places_a_rate_is_a_mean_and_at_one_it_is_that_one() -> None:
    known = calibration(
        *(PartRate("copy", "forward", "any", (place,), rate, 1.0) for place, rate in ((1, 100), (16, 400)))
    )
    rates = [known.rate("copy", "forward", "any", (place,)) for place in (1.0, 4.0, 16.0, 1e9)]
    assert rates[:3] == pytest.approx([100, 200, 400])
    assert 200 < rates[3] < 400
    assert known.seconds("copy", "forward", "any", (4.0,), 50) == pytest.approx(0.25)
    with pytest.raises(UserError, match="no figures of copy forward in bf16"):
        known.rate("copy", "forward", "bf16", (4.0,))


@pytest.mark.parametrize(
    ("text", "among"),
    [
        (None, "no calibration can be read"),
        ("[]", "is not a calibration of"),
        ('{"format": 2}', "format 2, not 1"),
        ('{"format": 1, "figures": [{"part": "copy"}]}', "is not a calibration of"),
        ('{"format": 1, "figures": []}', "is not a calibration of"),
    ],
)
def test_a_file_that_is_none_is_one_line(text: str | None, among: str, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "card.json"
    if text is not None:
        path.write_text(text)
    code, out, err = printed(main, ["plan", "examples/gpt-small.toml", "--calibration", str(path)], capsys)
    assert (code, out, err.count("\n")) == (2, "", 2)
    assert among in err
    assert "hint: trainer bench gpu" in err


def test_one_model_reads_a_sheet_and_a_calibration_of_the_same_figures() -> None:
    sheet = Rates.of_card("h100", **NETWORK)
    known = calibration_of(sheet)
    figures = known.figures
    measured = Rates.of_calibration(known, **NETWORK)
    sizes = {"model__num_layers": "4", "model__vocab_size": "512", "train__precision": "bf16"}
    run = run_of("examples/gpt-small.toml", parallel__pp="2", parallel__dp="2", parallel__schedule="zb-h1", **sizes)
    times = [asdict(fixed_plan(run, 4, rates).time) for rates in (measured, sheet)]
    assert times[0] == pytest.approx(times[1])
    faster = Rates.of_calibration(replace(known, figures=(replace(figures[0], seconds=0.5), *figures[1:])), **NETWORK)
    assert fixed_plan(run, 4, faster).time.products < times[1]["products"]


def test_each_part_runs_and_what_does_not_is_left_out(tmp_path: Path) -> None:
    cpu, lines = torch.device("cpu"), list[str]()
    known = list(probes(cpu, 1e9, TINY))

    def fail() -> Iterator[None]:
        raise RuntimeError("no such format\nat all")
        yield

    runs = working([*known, Probe("product", "fp4", (1,), {}, fail)], cpu, lines.append)
    assert (runs, lines) == (known, ["1 of product in fp4 left out: no such format"])
    times = timed(known, cpu, 0.01)
    assert set(times) == {(number, way) for number, probe in enumerate(known) for way in probe.work}
    assert min(times.values()) > 0
    assert {probe.part for probe in known} == {"product", "attention", *KERNEL_PARTS}


def test_a_round_has_each_probe_and_rests_between_products() -> None:
    def probe(part: str, work: float) -> Probe:
        return Probe(part, "bf16", (1,), {"forward": work}, lambda: iter([None]))

    second, tenth = probe("product", OPERATIONS_S), probe("copy", 0.1 * BYTES_S)
    assert mixed([second, second, tenth]) == [0, 2, 2, 1, 2, 2]
    both = [second, tenth, probe("attention", 0.2 * OPERATIONS_S), tenth]
    assert mixed(both) == [0, 2, 1, 3]
    assert mixed([second, tenth, tenth, tenth]) == [0, 1, 2, 3], "a probe that was not due comes last"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_round_on_a_gpu_waits_for_nothing() -> None:
    device = torch.device("cuda", 0)
    known = working(list(probes(device, 1e9, TINY)), device, lambda text: None)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for probe in known:
            for _ in probe.run():
                pass
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_part_too_large_for_the_device_is_not_tried() -> None:
    parts = [{probe.part for probe in probes(torch.device("cpu"), size, TINY)} for size in (1e9, 1e3)]
    assert parts[0] - parts[1] == {"product"}


@pytest.mark.slow
@pytest.mark.ci
def test_a_device_is_measured_and_a_run_planned_by_it(tmp_path: Path, capsys: Capture) -> None:
    file = str(tmp_path / "card.json")
    words = ["bench", "gpu", "--device", "cpu", "--seconds", "0.1", "--output", file]
    code, out, err = printed(main, words, capsys)
    assert code == 0, err
    assert out.startswith("part ")
    assert "wrote" in err
    known = read_calibration(file)
    assert known.card == "cpu"
    assert json.loads(Path(file).read_text()) == json.loads(json.dumps(known.known()))
    flags = ["--model.num-layers", "2", "--model.vocab-size", "512", "--fixed", "--json", "-"]
    words = ["plan", "examples/gpt-small.toml", "--gpus", "1", *flags, "--calibration", file]
    code, out, err = printed(main, words, capsys)
    assert code == 0, err
    assert err.startswith(f"figures are measured on cpu: {file}\n")
    (plan,) = json.loads(out)
    assert sum(plan["time"].values()) == pytest.approx(plan["seconds"])
    assert plan["time"]["products"] > 0


@pytest.mark.slow
def test_more_ranks_time_their_collectives(tmp_path: Path) -> None:
    file = tmp_path / "card.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command = [*launcher, "trainer", "bench", "gpu", "--device", "cpu", "--seconds", "0.1", "--output", str(file)]
    subprocess.run(command, check=True, timeout=300)
    rates = Rates.of_calibration(read_calibration(str(file)), **NETWORK)
    assert 0 < rates.call_s("all_reduce", 1e6, 2, 2) < rates.call_s("all_reduce", 1e8, 2, 2)
    assert rates.collective_s("receive", 1e6, 2, 2) > 0
