"""Each check of a verification finds a fault of its kind, and finds none in a run without one."""

from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
from hypothesis import Phase, given, settings

from tests.trainer.support.layouts import configs, layouts
from tests.trainer.verify.test_shrink import run_of
from trainer.config import Config
from trainer.engine import Engine
from trainer.linear import fp8
from trainer.verify.bench import Bench
from trainer.verify.beside import run_checks
from trainer.verify.checks import CHECKS, run_check
from trainer.verify.faults.named import FAULTS
from trainer.verify.locate import located
from trainer.verify.shrink import shrunk


def bench_of(folder: Path, run: Config) -> Bench:
    return Bench(shrunk(run), run, folder)


TEXTS = {  # of what a check says of a fault, by the fault's name
    "rows-of-first-rank": "tokens of sample 2 of step 1",
    "sum-left-out-on-one": "rank",
    "adamw-count": "the loss of step 2",
    "tokens-counted-per-rank": "step 1",
    "neighbours-interval": "the gradient norm nan",  # of memory that no rank filled
    "moments-left-out": "a resume at step 2",
    "loss-read-in-step": "makes the host wait",
    "weights-beside-masters": "in bf16",
    "residual-not-scaled": "layers.attn.out.weight begins with a deviation of",
    "one-name-for-all": "begins with the values of",
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_fault_is_found_by_its_check(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault, text = FAULTS[name], TEXTS[name]
    bench = bench_of(
        tmp_path, run_of("examples/tiny.toml", parallel__dp="2", train__micro_batch_size="2", train__precision="bf16")
    )
    fault.plant(monkeypatch)
    result = run_check(fault.seen_by, CHECKS[fault.seen_by], bench)
    assert (result.state, text in result.text) == ("FAILED", True), result


@pytest.mark.slow
@pytest.mark.ci
def test_bounds_of_documents_are_no_wait(tmp_path: Path) -> None:
    run = run_of("examples/tiny.toml", data__document_mask="true")
    assert run_check("no wait of the host", CHECKS["no wait of the host"], bench_of(tmp_path, run)).state == "ok"


@pytest.mark.slow
@pytest.mark.ci
def test_eight_bits_are_compared_in_sizes_that_take_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"fp8__recipe": "tensorwise", "fp8__wgrad": "fp8", "train__precision": "bf16", "parallel__tp": "2"}
    run, check = run_of("examples/tiny.toml", **flags), "products in eight bits"
    assert run_check(check, CHECKS[check], bench_of(tmp_path / "sound", run)).state == "ok"
    monkeypatch.setattr(fp8, "largest_of", lambda magnitudes, groups: magnitudes)
    result = run_check(check, CHECKS[check], bench_of(tmp_path / "own maxima", run))
    assert (result.state, "in one process" in result.text) == ("FAILED", True)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("how", ["bf16", "int8"])
def test_a_run_that_rounds_gradients_is_sound(how: str, tmp_path: Path) -> None:
    flags = {"parallel__dp": "2", "train__micro_batch_size": "2", "parallel__grad_reduce": how}
    bench = bench_of(tmp_path, run_of("examples/tiny.toml", **flags))
    for name in ("losses, norms, evaluation", "weights and moments", "gradients rounded to travel"):
        assert run_check(name, CHECKS[name], bench).state == "ok"


@pytest.mark.slow
@pytest.mark.ci
def test_schedules_that_differ_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of("examples/tiny.toml", parallel__pp="2", parallel__dp="2", train__micro_batch_size="2")
    check = "schedule, recompute, overlap"
    assert run_check(check, CHECKS[check], bench_of(tmp_path / "sound", run)).state == "ok"
    real = Engine.start_step

    def start_step(self: Engine, step: int, *args: Any, **options: Any) -> Any:
        shift = step + (self.config.parallel.schedule == "gpipe")
        return real(self, shift, *args, **options)

    monkeypatch.setattr(Engine, "start_step", start_step)
    result = run_check(check, CHECKS[check], bench_of(tmp_path / "other", run))
    assert result.state == "FAILED"
    assert "parallel.schedule gpipe" in result.text


@pytest.mark.slow
@pytest.mark.ci
def test_a_failure_names_the_first_tensor_and_the_smallest_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """QK-norm gradients that tp does not sum: neither pp nor dp is needed for that."""
    FAULTS["qk-norm-not-summed"].plant(monkeypatch)
    run = run_of(
        "examples/tiny.toml",
        parallel__tp="2",
        parallel__dp="2",
        parallel__pp="2",
        model__qk_norm="true",
        parallel__sequence_parallel="off",
        train__micro_batch_size="2",
    )
    bench, check = bench_of(tmp_path, run), "losses, norms, evaluation"
    result = run_check(check, CHECKS[check], bench)
    assert result.state == "FAILED"
    found = located(result, bench, deadline=perf_counter() + 60, max_ranks=64).text
    assert "the gradient norm of step 1" in found
    assert "first behind step 1: layers.0.attn.q_norm.weight" in found
    assert "it still fails with tp2, 1 layers" in found


def test_what_time_does_not_allow_is_not_run(tmp_path: Path) -> None:
    bench = bench_of(tmp_path, run_of("examples/tiny.toml"))
    assert {result.state for result in run_checks(bench, perf_counter())} == {"not run"}


@pytest.mark.slow
@pytest.mark.timeout(3000)
@settings(derandomize=True, database=None, phases=[Phase.generate], max_examples=200)
@given(run=configs(layouts(16)))
def test_random_layouts_raise_no_false_alarm(run: Config, tmp_path_factory: pytest.TempPathFactory) -> None:
    run = replace(run, data=replace(run.data, stores=("a", "b")))
    bench = bench_of(tmp_path_factory.mktemp("stores"), run)
    results = list(run_checks(bench, perf_counter() + 1000))
    assert not [result for result in results if result.state in ("FAILED", "not run")]
