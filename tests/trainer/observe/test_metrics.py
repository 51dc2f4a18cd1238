"""A metrics file holds one line a step whatever happened to the run."""

import json
import re
import resource
from dataclasses import replace
from pathlib import Path

import pytest

from threefold.console import log as log_line
from trainer.model.flops import TokenFlops
from trainer.observe.feed import Loss
from trainer.observe.json_lines import JsonLines, cut_back
from trainer.observe.metrics import Log, StepMetrics, throughput

KEYS = {
    "step", "loss", "grad_norm", "lr", "tokens", "loss_tokens", "tokens_per_s", "tokens_per_s_per_gpu",
    "samples_per_s", "tflops_per_gpu", "mfu", "step_s",
    "data_wait_s", "comm_s", "comm_tp_s", "comm_cp_s", "comm_dp_s", "bubble_s", "checkpoint_stall_s", "memory_gib",
    "memory_of_plan",
}  # fmt: skip


def metrics(step: int, *, peak: float | None = None) -> StepMetrics:
    rates = throughput(
        num_tokens=4000, num_samples=4, step_s=2.0, world_size=2, flops=TokenFlops(0.0, 1e6, 1e6), peak=peak
    )
    return StepMetrics(
        step=step, loss=3.5, grad_norm=1.0, lr=1e-3, tokens=4000 * step, loss_tokens=3900, step_s=2.0,
        data_wait_s=0.1, comm_s=0.2, comm_tp_s=0.1, comm_cp_s=0.0, comm_dp_s=0.05, bubble_s=0.3, checkpoint_stall_s=0.0,
        memory_gib=1.0, memory_of_plan=None, **rates,
    )  # fmt: skip


def log_to(path: Path, *, start: int = 0, interval: int = 1) -> Log:
    return Log(JsonLines(str(path), start_step=start, say=log_line), train_steps=10, interval=interval)


def write(path: Path, start: int, stop: int) -> None:
    log = log_to(path, start=start)
    for step in range(start + 1, stop + 1):
        log.step(metrics(step))
    log.event("save", stop, ok=True, stall_s=0.1, write_s=0.2, bytes=7)


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_holds_all_keys_and_its_rates(tmp_path: Path) -> None:
    write(tmp_path / "m.jsonl", 0, 2)
    lines = read(tmp_path / "m.jsonl")
    assert lines[0].keys() >= KEYS
    assert lines[0]["tokens_per_s"] == 2000
    assert lines[0]["tokens_per_s_per_gpu"] == 1000
    assert lines[0]["loss_tokens"] == 3900
    assert lines[0]["tflops_per_gpu"] == pytest.approx(1000 * 1e6 / 1e12)
    assert lines[0]["mfu"] is None
    assert lines[2] == {"event": "save", "step": 2, "ok": True, "stall_s": 0.1, "write_s": 0.2, "bytes": 7}


def test_utilisation_against_a_peak() -> None:
    line = metrics(1, peak=1e10)
    assert line.mfu == pytest.approx(0.1)
    assert line.mfu_with_embeddings == pytest.approx(0.2)
    assert line.mfu_causal == pytest.approx(0.05)
    assert "mfu 10.0%" in line.console(10, 0.0)


def test_the_console_line_is_narrow_and_says_what_waits() -> None:
    line = "step  1/10  loss 3.5000  grad 1.000  lr 1.00e-03  2,000 tok/s (1,000 a rank)  eta 1:02:03  1.00 GiB"
    assert metrics(1).console(10, 3723.4) == line  # what waits would be too much
    alone = replace(metrics(1), tokens_per_s_per_gpu=2000.0)
    line = line.replace(" (1,000 a rank)", "")
    assert alone.console(10, 3723.4) == f"{line}  comm 10%"  # the bubble's 15% would be too much
    assert replace(alone, comm_s=0.0, bubble_s=0.0).console(10, 3723.4) == f"{line}  3,900 loss tok"
    wide = replace(metrics(1_000_000, peak=1e10), grad_norm=12345.678, tokens_per_s=123456789.0, loss=1234.5)
    assert len(wide.console(100_000_000, 1e7)) <= 100
    assert wide.console(100_000_000, 1e7).startswith("step   1000000/100000000  loss 1234.5000  grad 12345.678  lr")


def test_the_time_left_is_that_of_the_steps_after_the_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([1000.0, 1010.0, 1020.0])
    monkeypatch.setattr("trainer.observe.metrics.time.monotonic", lambda: next(now))
    log = Log(None, train_steps=103, interval=1)
    for step in (41, 42, 43):
        log.step(metrics(step))
    assert re.findall(r"eta (\S+)", capsys.readouterr().err) == ["0:02:04", "0:10:10", "0:10:00"]


def test_a_resume_leaves_one_line_a_step(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "m.jsonl"
    write(path, 0, 7)
    with path.open("a") as file:
        file.write('{"step": 8, "lo')  # killed while writing
    write(path, 5, 9)
    lines = read(path)
    assert [line["step"] for line in lines if "event" not in line] == list(range(1, 10))
    assert [line["step"] for line in lines if "event" in line] == [9]


def test_cutting_back_keeps_what_is_no_line_of_ours_out(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'[]\n\xff\xfe\n{"step": "x"}\n{"step": 1}\n{"a": 2}\n' + b"[" * 100_000 + b'\n{"step": 2}')
    cut_back(path, 5)
    assert path.read_text() == '{"step": 1}\n'


def test_a_silent_rank_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = Log(None, train_steps=10, interval=1, active=False)
    log.step(metrics(1))
    log.end(1, complete=False)
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().err == ""


def test_lines_that_found_no_room_come_later(tmp_path: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))  # as small a disk as it gets
    try:
        log = log_to(tmp_path / "m.jsonl", interval=100)
        for step in range(1, 7):
            log.step(metrics(step))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    log.step(metrics(7))
    log.end(7, complete=False)
    assert [line["step"] for line in read(tmp_path / "m.jsonl") if "event" not in line] == list(range(1, 8))


def test_no_line_holds_a_password(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = log_to(tmp_path / "m.jsonl")
    log.event("copy", 1, url="sftp://me:hunter2@host/run", error="cannot write sftp://me:hunter2@host/run/x")
    log.say("resuming from sftp://me:hunter2@host/run")
    assert read(tmp_path / "m.jsonl")[0]["url"] == "sftp://***@host/run"
    assert "hunter2" not in (tmp_path / "m.jsonl").read_text() + capsys.readouterr().err


def test_what_a_sink_lost_is_said_and_is_the_last_event(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Late:
        """A feed whose sink took two of three lines."""

        def write(self, line: dict) -> None: ...
        def close(self) -> None: ...
        def ended(self, within_s: float) -> Loss:
            return Loss("wandb", 3, 1)

    file = JsonLines(str(tmp_path / "m.jsonl"), start_step=0, say=log_line)
    log = Log(file, [Late()], train_steps=1, interval=1)  # type: ignore[list-item]
    log.step(metrics(1))
    log.end(1, complete=True)
    log.end(1, complete=False, error="once is enough")
    assert read(tmp_path / "m.jsonl")[1:] == [
        {"event": "end", "step": 1, "complete": True},
        {"event": "sink", "step": 1, "sink": "wandb", "lines": 3, "lost": 1},
    ]
    assert "warning: wandb lost 1 of 3 lines" in capsys.readouterr().err
