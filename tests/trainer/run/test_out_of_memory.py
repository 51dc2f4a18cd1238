"""No memory in a step ends the job once: with the rank, what grew, and the settings that save most."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit.runs.catalogue import committed_steps
from tests.trainer.support.training import ROOT, call, lines
from threefold.storage import open_storage
from trainer.engine import Engine
from trainer.run import loop
from trainer.run.out_of_memory import is_out_of_memory

CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.18 GiB of which 1.1 is free."
PLANTED = """
import os, sys, time, torch
from trainer.cli import main
from trainer.engine import Engine

run, calls = Engine._run, []

def planted(self, *arguments, **named):
    calls.append(1)
    if len(calls) == 3 and os.environ["RANK"] == "1":
        torch.empty(1 << 58, dtype=torch.uint8)
    if len(calls) == 3 and "WAITS" in os.environ:
        time.sleep(1000)
    return run(self, *arguments, **named)

Engine._run = planted
sys.exit(main(sys.argv[1:]))
"""


def fail_in_step(patch: pytest.MonkeyPatch, number: int, error: Exception | None) -> None:
    run, calls = Engine._run, list[int]()

    def planted(self: Engine, *arguments: Any, **named: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == number:
            if error is not None:
                raise error
            torch.empty(1 << 58, dtype=torch.uint8)
        return run(self, *arguments, **named)

    patch.setattr(Engine, "_run", planted)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (None, "can't allocate memory: you tried to allocate 288230376151711744 bytes"),
        (torch.OutOfMemoryError(CUDA), "CUDA out of memory. Tried to allocate 2.00 GiB; "),
        (MemoryError(), "out of memory: nothing is left; "),
    ],
    ids=["of a CPU", "of a GPU", "of the process"],
)
def test_a_step_without_memory_is_answered(
    error: Exception | None, says: str, job_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [job_config, "--train-steps", 6, "--save", tmp_path / "run"]
    with pytest.MonkeyPatch.context() as patch:
        fail_in_step(patch, 4, error)
        assert call("train", *command) == 2
    text = capsys.readouterr().err
    assert says in text
    assert re.search(r"what grew: what passes take, [\d.]+ [KMG]?i?B beside a plan of ", text)
    assert len(re.findall(r"^  --.+ saves [\d.]+ [KMG]iB$", text, re.MULTILINE)) == 3
    assert "hint: --" in text
    assert "Traceback" not in text
    assert committed_steps(open_storage(tmp_path / "run")) == [3]
    assert call("train", *command) == 0  # the same command goes on


def test_a_state_that_finds_no_memory_is_answered(
    job_config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError(CUDA)

    monkeypatch.setattr(loop, "Engine", fail)
    assert call("train", job_config, "--train-steps", 1) == 2
    text = capsys.readouterr().err
    assert "what grew: the state, of which " in text
    assert len(re.findall(r"^  --.+ saves ", text, re.MULTILINE)) == 3
    assert "Traceback" not in text


def test_other_faults_are_none_of_memory() -> None:
    assert not is_out_of_memory(RuntimeError("the shapes do not fit"))
    assert is_out_of_memory(torch.OutOfMemoryError(CUDA))


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment", [pytest.param({}, marks=pytest.mark.ci), {"WAITS": "1"}], ids=["lost", "waits in a kernel"]
)
def test_one_rank_without_memory_ends_all_and_speaks_alone(
    environment: dict[str, str], job_config: Path, tmp_path: Path
) -> None:
    script = tmp_path / "planted.py"
    script.write_text(PLANTED)
    flags = ["train", job_config, "--dp", 2, "--metrics", tmp_path / "m.jsonl", "--save", tmp_path / "run"]
    command = [sys.executable, "-m", "trainer", "launch", "--standalone", "--nproc-per-node", 2, script, *flags]
    done = subprocess.run(
        [str(word) for word in command], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert re.findall("^error: (.{14})", done.stderr, re.MULTILINE) == ["on rank 1 of 2"], done.stderr
    assert "Traceback" not in done.stderr
    assert len(re.findall(r"^  --.+ saves ", done.stderr, re.MULTILINE)) == 3
    assert [line["step"] for line in lines(tmp_path / "m.jsonl") if "event" not in line] == [1, 2]


def test_a_cpu_has_no_share_of_a_plan(job_config: Path, tmp_path: Path) -> None:
    assert call("train", job_config, "--train-steps", 1, "--metrics", tmp_path / "m.jsonl") == 0
    [step] = [line for line in lines(tmp_path / "m.jsonl") if "event" not in line]
    assert step["memory_of_plan"] is None
