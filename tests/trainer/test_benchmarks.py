"""What of benchmarks/trainer runs without GPUs: its rows are runs that can start, its peers' lines, a profiled step."""

import argparse
import gzip
import importlib
import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.record import Record
from benchmarks.trainer.gpu import HERE, ROWS, figures, launcher, peer, rate_of, ratios, rows_of
from datakit import write_store
from tests.trainer.support.calibrated import calibration_of
from tests.trainer.support.training import CONFIG, ROOT, VOCAB_SIZE, call
from trainer.plan.rates import Rates

STEP = ROOT / "benchmarks" / "trainer" / "step.py"


@pytest.fixture(scope="module")
def long_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token store for the longest rows."""
    path = tmp_path_factory.mktemp("long") / "store"
    write_store(path, [np.arange(1 << 16) % VOCAB_SIZE] * 5, vocab_size=VOCAB_SIZE, eod_id=VOCAB_SIZE - 1)
    return path


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_a_run_that_can_start(name: str, long_store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = ROWS[name]
    assert call("train", *row.flags, "--data.stores", long_store, "--dry-run") == 0
    said = capsys.readouterr().err
    assert f" = {row.num_gpus} rank" in said
    assert not row.beside or ROWS[row.beside].model == row.model
    assert len(launcher(row.num_gpus)) == (5 if row.num_gpus > 1 else 0)


def test_rows_of_four_gpus_come_with_those_they_are_compared_with() -> None:
    names = rows_of(4, 4)
    assert {"1b", "1b-by-1", "1b-by-16", "1b-dp4", "1b-dp2-tp2", "1b-dp2-pp2", "1b-tp2-pp2"} <= set(names)
    assert names == [name for name in ROWS if name in names], "what is compared with comes first"
    assert {ROWS[name].beside for name in names} - {""} <= set(names)
    assert not any(ROWS[name].num_gpus == 2 for name in names)
    assert {ROWS[name].num_gpus for name in rows_of(None, 2)} == {1, 2}


def test_a_peer_is_run_by_its_folders_program(tmp_path: Path) -> None:
    program = 'echo noise; [ "$NPROC" = 4 ] || exit 1; echo "RESULT $1 $2 tok/s/gpu=  61838 TFLOPs= 400.0"'
    (tmp_path / "run.sh").write_text(program)
    line = peer(tmp_path, 4, "mc.py --model 1b", tmp_path)
    assert line.startswith("RESULT single mc.py --model 1b tok/s")
    assert rate_of(line) == 61838
    failed = peer(tmp_path, 2, "mc.py", tmp_path)
    assert failed.startswith("mc.py failed")
    assert rate_of(failed) == 0


def test_a_row_is_compared_with_its_peers_and_another_row() -> None:
    rates = {"1b": 80_000.0, "1b before": 64_000.0, "1b-dp4": 76_000.0, "350m": 1.0}
    lines = ratios(rates, {"1b-dp4": {"tt.py": 38_000.0, "mc.py": 0.0}})
    assert [line.split(maxsplit=1) for line in lines] == [
        ["1b", "1.250 of 1b before"],
        ["1b-dp4", "0.950 of 1b; 2.000 of tt.py"],
    ]
    keys = ("mfu", "mfu_causal", "step_s", "comm_s", "bubble_s", "memory_gib", "loss")
    steps = [dict.fromkeys(keys, 0.5 if number > 4 else 9.0) | {"memory_of_plan": 0.98} for number in range(8)]
    assert figures("1b", 80_000.0, steps, 3.0).split() == (
        ["1b", "80,000", "50.0%", "50.0%", "500.0", "500.0", "500.0", "0.5", "0.98", "3.0", "9.0000", "->", "0.5000"]
    )


def test_layouts_that_are_compared_are_runs_of_the_same_samples(
    job_config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(HERE)  # as if the program itself was started
    from benchmarks.trainer.layouts import LAYOUTS, OPTIM, gaps

    for name, row in LAYOUTS.items():
        assert call("train", *row.flags, *OPTIM, "--data.stores", job_config.parent / "train", "--dry-run") == 0, name
        said = capsys.readouterr().err
        assert f" = {row.num_gpus} rank" in said
        assert "32 samples of 4096" in said
    one, other = ([{"loss": loss, "grad_norm": norm} for loss, norm in steps] for steps in (
        [(3.0, 2.0), (2.5, 1.0)], [(3.0, 2.0), (2.25, 1.25)]
    ))  # fmt: skip
    assert gaps(one, other) == pytest.approx((0.25, 0.2))


def test_bits_are_compared_of_runs_that_can_start(
    long_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(HERE)
    from benchmarks.trainer.bits import drawn, promised

    pairs = list(promised())
    cases = {case.name: case for case in [*drawn(random.Random(0), 30, 4), *itertools.chain(*pairs)]}
    assert {case.num_ranks for case in cases.values()} == {1, 2, 4}
    (tmp_path / "run.toml").write_text("[train]\nseq_length = 64\n")
    flags = [tmp_path / "run.toml", "--data.stores", long_store, "--train.device", "cpu", "--deterministic"]
    for case in cases.values():
        assert call("train", *flags, *case.flags, "--dry-run") == 0, case
        assert f" = {case.num_ranks} rank" in capsys.readouterr().err
    assert all(a.values != b.values for a, b in pairs)


@pytest.mark.slow
def test_what_differs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(HERE)
    from benchmarks.trainer import bits

    equal, (one, again) = [next(bits.promised())], next(pair for pair in bits.promised() if pair[0].num_ranks == 1)
    other = bits.Case("another seed", one.values | {"train.seed": 1})
    for pairs, code in (([*equal, (one, again)], 0), ([(one, again), (one, other)], 1)):
        monkeypatch.setattr(bits, "promised", lambda pairs=pairs: iter(pairs))
        arguments = argparse.Namespace(output=tmp_path / "out", before=None, device="cpu", record=Record())
        assert bits.compare(arguments) == code
    printed = capsys.readouterr().out
    assert "2 of 2 are equal" in printed
    assert "differs: fp64 one = another seed\n1 of 2 are equal" in printed


@pytest.mark.slow
def test_a_step_of_a_layout_is_profiled(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(
        CONFIG.format(folder=tmp_path).replace("[data]", f"vocab_size = {VOCAB_SIZE}\n[data]", 1)
    )
    flags = ["--model", tmp_path / "tiny.toml", "--micro-batch-size", 2, "--global-batch-size", 8, "--steps", 7]
    flags += ["--tp", 2, "--tp-overlap-parts", 2, "--trace", tmp_path / "step.json.gz"]
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, STEP, *flags]
    ended = subprocess.run(
        list(map(str, start)), capture_output=True, text=True, cwd=ROOT, timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "CPU, tp2, attention " in ended.stdout
    assert "4 micro-batches of 2 x 32 tokens" in ended.stdout
    assert json.loads(gzip.decompress((tmp_path / "step.json.gz").read_bytes()))["traceEvents"]


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("position", ["rope", "learned"])
def test_the_script_beside_the_curves_trains_as_the_trainer(
    position: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(HERE)
    curves = importlib.import_module("curves")
    sizes = "num_layers = 2\nhidden_size = 16\nnum_heads = 2\nffn_hidden_size = 32\nvocab_size = 64"
    train = 'device = "cpu"\nprecision = "fp32"\nseq_length = 16'
    tables = f'[model]\n{sizes}\nposition = "{position}"\n[optim]\n[train]\n{train}\n'
    (tmp_path / "small.toml").write_text(tables)
    write_store(tmp_path / "store", [np.arange(400) % 50] * 5, vocab_size=64, eod_id=63)
    monkeypatch.setattr(curves, "make_store", lambda output: tmp_path / "store")
    options = {"model": str(tmp_path / "small"), "samples": 2, "lr": 1e-2, "warmup_steps": 2, "train_steps": 6}
    words = argparse.Namespace(output=tmp_path / "out", also=["full"], record=Record(), **options)
    assert curves.benchmark(words) == 0
    runs = {
        name: [json.loads(line)["loss"] for line in (tmp_path / f"out/{name}.jsonl").open() if "loss" in line]
        for name in ("fused", "torch", "script", "moved", "full")
    }
    for name in ("torch", "script", "full"):
        np.testing.assert_allclose(runs[name], runs["fused"], rtol=1e-4)
    assert runs["moved"] != runs["script"]
    assert "moved less script: largest" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.ci
def test_plans_are_drawn_by_a_commit_and_held_to_steps(tmp_path: Path) -> None:
    card, plans = tmp_path / "card.json", tmp_path / "plans.json"
    card.write_text(json.dumps(calibration_of(Rates.of_card("h100", network=50e9, node=8)).known()))

    def verb(*words: object) -> str:
        script = [sys.executable, str(STEP.with_name("plans.py")), *map(str, words), "--calibration", str(card)]
        done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert len(verb("predict", plans).splitlines()) == 12
    known = json.loads(plans.read_text())
    assert [row["num_gpus"] for row in known["runs"][:8]] == [1, 1, 1, 2, 2, 2, 2, 2]
    assert len({row["model"] for row in known["runs"][8:]}) == 4, "drawn ones are of other models each"
    small = tmp_path / "small.toml"
    small.write_text(
        "[model]\nnum_layers = 1\nhidden_size = 32\nnum_heads = 2\nvocab_size = 64\n"
        "[train]\nseq_length = 32\nmicro_batch_size = 4\nglobal_batch_size = 4\nprecision = 'bf16'\ndevice = 'cpu'\n"
    )
    row = {"num_gpus": 1, "model": str(small), "flags": ""}
    plans.write_text(json.dumps(known | {"runs": [row, row | {"num_gpus": 2}]}))
    lines = verb("measure", plans, "--gpus", 1, "--steps", 6).splitlines()
    assert len(lines) == 3, "a run on more GPUs is left out"
    assert " ms, " in lines[0]
    assert "failed" not in lines[0]
