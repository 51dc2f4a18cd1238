"""Checks of many ranks are made by two processes, with the results of one; what its end took along was not run."""

import json
import subprocess
from dataclasses import asdict
from pathlib import Path
from time import perf_counter

import pytest

from tests.trainer.verify.test_checks import bench_of
from tests.trainer.verify.test_shrink import run_of
from trainer.verify.beside import BESIDE, config_of, result_of, run_checks
from trainer.verify.checks import CHECKS
from trainer.verify.shrink import shrunk


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("seconds", [0, 100])
def test_two_processes_come_to_what_one_does(tmp_path: Path, seconds: float) -> None:
    both = []
    for number, many in enumerate((1, 64)):
        folder = tmp_path / str(number)
        folder.mkdir()
        run = run_of("examples/tiny.toml", parallel__dp="2", train__micro_batch_size="2", train__precision="bf16")
        bench = bench_of(folder, run)
        results = run_checks(bench, perf_counter() + seconds, many=many)
        both.append([(result.name, result.state, result.difference, result.text) for result in results])
    assert both[0] == both[1]
    assert [name for name, *_ in both[0]] == list(CHECKS)


def test_the_process_beside_makes_checks_that_there_are() -> None:
    assert CHECKS.keys() > BESIDE


@pytest.mark.parametrize("name", ["tiny", "qwen3-30b-a3b", "llama-3-8b"])
def test_a_run_and_its_small_one_are_told_whole(name: str) -> None:
    run = run_of(f"examples/{name}.toml", model__vocab_size="512")
    for config in (run, shrunk(run).config):
        assert config_of(json.loads(json.dumps(asdict(config)))) == config


def test_what_a_process_did_not_come_to_is_not_run() -> None:
    with subprocess.Popen(["false"], stdout=subprocess.PIPE) as process:
        result = result_of(process, "no wait of the host")
    assert (result.state, result.text) == ("not run", "the process beside ended with exit code 1")
