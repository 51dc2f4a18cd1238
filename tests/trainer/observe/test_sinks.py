"""What real sinks hold of a run, read back by their own readers, is what the metrics file holds.

The packages are in an environment of their own: where one is not, its tests skip.
"""

import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from tests.trainer.support.sink_readers import of_mlflow, of_tensorboard, of_wandb
from tests.trainer.support.training import call
from trainer.observe.sinks.sink import dotted, numbers_of

pytestmark = [pytest.mark.ci, pytest.mark.slow]
NAMES = ("tensorboard", "wandb", "mlflow")


def as_float(number: float) -> float:
    """A number as 32 bits hold it."""
    [value] = struct.unpack("<f", struct.pack("<f", number))
    return float(value)


def train(config: Path, folder: Path, steps: int, *flags: object, to: str) -> list[dict[str, Any]]:
    """Train with a sink, in a folder; the lines of the metrics file."""
    where = ["--save", folder / "run", "--metrics", folder / "m.jsonl", "--save-interval", 4]
    sinks = ["--log.to", f"jsonl,{to}", "--train.eval-interval", 3, "--log.norms-interval", 2]
    sinks += ["--log.tensorboard-dir", folder / "tb"] if to == "tensorboard" else []
    assert call("train", config, "--train-steps", steps, *where, *sinks, *flags) == 0
    return [json.loads(line) for line in (folder / "m.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module", params=NAMES)
def sunk(
    request: pytest.FixtureRequest, job_config: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, list[dict[str, Any]], Path]:
    """A run of 8 steps that lost the last save, and goes on from step 4 to step 10; its sink and its lines."""
    name: str = request.param
    pytest.importorskip(name)
    folder = tmp_path_factory.mktemp(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("WANDB_MODE", "offline")
        train(job_config, folder, 8, to=name)
        shutil.rmtree(folder / "run" / "step-000000008")
        return name, train(job_config, folder, 10, to=name), folder


def numbers_in(name: str, folder: Path) -> tuple[set[str], dict[int, dict[str, Any]]]:
    if name == "tensorboard":
        return {"it has none"}, of_tensorboard(folder / "tb")
    return of_wandb(folder / "wandb") if name == "wandb" else of_mlflow(folder / "mlflow.db")


def test_a_sink_holds_each_step_once_with_the_values_of_its_line(
    sunk: tuple[str, list[dict[str, Any]], Path],
) -> None:
    name, lines, folder = sunk
    runs, numbers = numbers_in(name, folder)
    assert len(runs) == 1  # a resume goes on with it
    steps = [line for line in lines if "event" not in line]
    assert [line["step"] for line in steps] == list(range(1, 11))
    for line in steps:
        row, expected = numbers[line["step"]], numbers_of(line)
        assert len(expected) > 20
        assert any(key.startswith("weight_norms/layers.0") for key in expected) == (line["step"] % 2 == 0)
        for key, value in expected.items():
            assert row[key] == (as_float(value) if name == "tensorboard" else value), (line["step"], key)


def test_a_sink_holds_events_and_settings(sunk: tuple[str, list[dict[str, Any]], Path]) -> None:
    name, lines, folder = sunk
    _, numbers = numbers_in(name, folder)
    for line in (line for line in lines if line.get("event") == "eval"):
        rows = [row for step, row in numbers.items() if step >= line["step"] and "eval/loss" in row]
        value = as_float(line["loss"]) if name == "tensorboard" else line["loss"]
        assert value in [row["eval/loss"] for row in rows]
    settings = dotted({"model": {"hidden_size": 32}, "train": {"seq_length": 32}})
    assert settings_in(name, folder).items() >= {key: str(value) for key, value in settings.items()}.items()


def settings_in(name: str, folder: Path) -> Mapping[str, str]:
    """The settings that a sink holds, as texts."""
    if name == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        accumulator = EventAccumulator(str(folder / "tb"))
        accumulator.Reload()
        text = accumulator.Tensors("settings/text_summary")[-1].tensor_proto.string_val[0].decode()
        rows = [row.strip("| ").split(" | ") for row in text.splitlines()[2:]]
        return {row[0]: row[-1] for row in rows}
    if name == "wandb":
        from tests.trainer.support.sink_readers import records

        [*_, path] = sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"))
        [run] = [record.run for record in records(path) if record.WhichOneof("record_type") == "run"]
        return {item.key: item.value_json for item in run.config.update}
    import sqlite3

    with sqlite3.connect(folder / "mlflow.db") as connection:
        return dict(connection.execute("select key, value from params").fetchall())


def test_a_run_that_was_not_rewound_goes_on_too(
    job_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    train(job_config, tmp_path, 2, to="mlflow")
    train(job_config, tmp_path, 4, to="mlflow")
    runs, numbers = of_mlflow(tmp_path / "mlflow.db")
    assert len(runs) == 1
    assert sorted(step for step in numbers if "grad_norm" in numbers[step]) == [1, 2, 3, 4]


def test_without_a_network_one_line_says_so_and_lines_are_kept(
    job_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    lines = train(job_config, tmp_path, 3, to="wandb")
    [text] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: wandb")]
    assert text.startswith("warning: wandb: no connection (127.0.0.1: Connection refused): lines are kept in ")
    assert text.endswith(f"wandb sync {next((tmp_path / 'wandb').glob('offline-run-*'))}")
    _, rows = of_wandb(tmp_path / "wandb")
    assert [rows[step]["loss"] for step in (1, 2, 3)] == [line["loss"] for line in lines if "event" not in line]


@pytest.mark.timeout(240)
def test_a_server_of_mlflow_has_the_steps_that_stay_in_another_run(
    job_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    places = ["--backend-store-uri", "sqlite:///mlflow.db", "--artifacts-destination", str(tmp_path / "artifacts")]
    command = [sys.executable, "-m", "mlflow", "server", *places, "--port", str(port), "--workers", "1"]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as server:
        try:
            while server.poll() is None:
                with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                    break
                time.sleep(0.2)
            monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
            train(job_config, tmp_path, 8, to="mlflow")
            shutil.rmtree(tmp_path / "run" / "step-000000008")
            lines = train(job_config, tmp_path, 10, to="mlflow")
        finally:
            os.killpg(server.pid, signal.SIGTERM)
    runs, numbers = of_mlflow(tmp_path / "mlflow.db")
    assert len(runs) == 1
    for line in (line for line in lines if "event" not in line):
        assert numbers[line["step"]].items() >= numbers_of(line).items()
    assert settings_in("mlflow", tmp_path)["model.hidden_size"] == "32"


def test_a_sink_that_is_named_later_begins_there(
    job_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it is rewound to no step that it never had."""
    pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert call("train", job_config, "--train-steps", 2, "--save", tmp_path / "run") == 0
    train(job_config, tmp_path, 4, to="wandb")

    assert "branch_point" not in json.loads(settings_in("wandb", tmp_path)["_wandb"])
    _, rows = of_wandb(tmp_path / "wandb")
    assert sorted(step for step, row in rows.items() if "grad_norm" in row) == [3, 4]
    train(job_config, tmp_path, 5, to="wandb")
    assert json.loads(settings_in("wandb", tmp_path)["_wandb"])["branch_point"]["step"] == 4
