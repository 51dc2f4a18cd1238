"""Some steps of a run are profiled: a trace, a table by kind, ranges; without that no profiler of torch is called."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.support.training import call, curve
from trainer.config.profile import range_of
from trainer.engine import Engine
from trainer.observe.kernels import by_kind, idle_ms, kind_of
from trainer.run.profiler import Profiler


def trace(folder: Path) -> set[str]:
    """The names of events in the first rank's trace."""
    text = gzip.decompress((folder / "trace-rank-00000.json.gz").read_bytes())
    return {event["name"] for event in json.loads(text)["traceEvents"]}


@pytest.mark.ci
@pytest.mark.slow
def test_steps_of_a_range_are_traced(job_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--profile-step-range", "2-3", "--profile-output-path", tmp_path / "profile", "--train-steps", 4]
    assert call("train", job_config, "--metrics", tmp_path / "on.jsonl", *flags) == 0
    names = trace(tmp_path / "profile")
    assert {"F stage 0 micro-batch 7", "B stage 0 micro-batch 0", "layer 2"} <= names
    assert any(name.startswith("aten::") for name in names)
    lines = (tmp_path / "profile" / "kernels-rank-00000.txt").read_text().splitlines()
    assert lines[0].startswith("operations ")
    assert any(line.startswith("matrix products ") for line in lines)
    assert "steps 2-3 are profiled in" in capsys.readouterr().err
    assert call("train", job_config, "--metrics", tmp_path / "off.jsonl", "--train-steps", 4) == 0
    assert curve(tmp_path / "on.jsonl") == curve(tmp_path / "off.jsonl")


def test_without_a_range_nothing_of_a_profiler_is_called(
    job_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a run that is not profiled calls a profiler")

    for owner, name in (
        (torch.profiler, "record_function"),
        (torch.profiler, "profile"),
        (torch.autograd.profiler, "record_function"),
        (torch.cuda.nvtx, "range_push"),
        (torch.cuda.memory, "_record_memory_history"),
    ):
        monkeypatch.setattr(owner, name, refuse)
    assert call("train", job_config, "--metrics", tmp_path / "m.jsonl", "--train-steps", 2) == 0


@pytest.mark.ci
@pytest.mark.slow
def test_a_range_that_the_run_ends_in_is_written(job_config: Path, tmp_path: Path) -> None:
    flags = ["--profile-step-range", "2-9", "--profile-output-path", tmp_path / "profile", "--train-steps", 3]
    assert call("train", job_config, "--metrics", tmp_path / "m.jsonl", *flags) == 0
    assert "layer 0" in trace(tmp_path / "profile")


def test_a_gpu_that_runs_out_of_memory_has_it_written(
    job_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begin = Profiler.__init__

    def begin_on_gpu(self: Profiler, *arguments: Any) -> None:
        begin(self, *arguments)
        self._on_gpu = True

    def run_out(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Profiler, "__init__", begin_on_gpu)
    monkeypatch.setattr(Engine, "start_step", run_out)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).touch())
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **_: None)
    flags = ["--profile-step-range", "2-3", "--profile-output-path", tmp_path / "profile"]
    assert call("train", job_config, *flags, "--train-steps", 4) != 0
    assert (tmp_path / "profile" / "memory-rank-00000.pickle").exists()
    assert "memory" in capsys.readouterr().err


def test_a_range_behind_the_end_is_one_line(job_config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("train", job_config, "--profile-step-range", "10-12", "--train-steps", 4) == 2
    assert "profile.step_range 10-12 is behind the last step, 4: --profile-step-range 2-4" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0-3", "5-4", "x", "3-", "-3", "1.5"])
def test_a_range_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="FIRST-LAST"):
        range_of(text)
    assert (range_of("07"), range_of("3-12"), range_of("")) == ("7-7", "3-12", "")


@pytest.mark.parametrize(
    ("name", "on_gpu", "kind"),
    [
        ("nvjet_hsh_256x128_64x4", True, "matrix products"),
        ("ncclDevKernel_AllGather_RING_LL", True, "transfers"),
        ("cudnn_generated_fort_native_sdpa", True, "attention"),
        ("Memcpy DtoD (Device -> Device)", True, "copies"),
        ("aten::addmm", False, "matrix products"),
        ("gloo:all_reduce", False, "transfers"),
        ("aten::mul", False, "other"),
    ],
)
def test_a_kernel_has_a_kind(name: str, kind: str, *, on_gpu: bool) -> None:
    assert kind_of(name, on_gpu=on_gpu) == kind


def test_kinds_are_added_and_what_is_left_is_idle() -> None:
    rows = by_kind([("a_gemm", 2.0), ("rope", 1.0), ("b_gemm", 3.0)], on_gpu=True)
    assert [(row.kind, row.milliseconds, row.num_kernels) for row in rows] == [
        ("matrix products", 5.0, 2),
        ("RoPE", 1.0, 1),
    ]
    assert idle_ms([(0, 4), (2, 5), (8, 9)]) == pytest.approx(0.003)
    assert idle_ms([]) == 0.0
