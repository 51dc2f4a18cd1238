"""What ends a job is said once: in the ranks' error files, and as the last lines of rank 0."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.support.training import ROOT, call
from tests.trainer.test_data import BAD, spoilt_store
from threefold.errors import StorageError
from trainer.job.failure import record


def test_an_error_has_the_form_that_torch_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

    messages = {}
    for writer in (record, ErrorHandler().record_exception):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
        try:
            raise RuntimeError("a fault of ours")
        except RuntimeError as error:
            writer(error)
        message = json.loads((tmp_path / "error.json").read_text())["message"]
        assert abs(int(message["extraInfo"].pop("timestamp")) - (tmp_path / "error.json").stat().st_mtime) < 60
        assert message["extraInfo"].pop("py_callstack").startswith("Traceback (most recent call last):")
        messages[writer] = message
    ours, torchs = messages.values()
    assert ours == torchs
    record(StorageError("no space left on ftp://me:secret@host/data", hint="df -h /data"))
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message["message"] == "StorageError: no space left on ftp://***@host/data\nhint: df -h /data"
    assert message["extraInfo"]["py_callstack"] == message["message"]
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "nowhere" / "error.json"))
    record(ValueError("no file can be written"))


@pytest.mark.parametrize("flags", [["--bogus", 1], ["--data.stores", "nowhere"]])
def test_what_a_command_refuses_is_in_its_error_file(
    job_config: Path, tmp_path: Path, flags: list, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    try:
        code = call("train", job_config, *flags)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    said = re.search("error: (.*)", capsys.readouterr().err)
    assert said
    assert said[1] in json.loads((tmp_path / "error.json").read_text())["message"]["message"]


@pytest.mark.ci
@pytest.mark.slow
def test_an_error_of_a_job_is_its_last_line(job_config: Path, tmp_path: Path) -> None:
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "--redirects=3", "--log-dir", tmp_path]
    flags = ["--data.stores", spoilt_store(tmp_path / "store"), "--train-steps", 1000, "--log.interval", 1000]
    command = [sys.executable, "-m", *launcher, "-m", "trainer", "train", job_config, *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(word) for word in command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1
    logs = {path.parent.name: path.read_text() for path in tmp_path.rglob("stderr.log")}
    expected = (
        rf"error: on rank [01] of 2: {tmp_path}/store holds token {BAD} at address 6,620, .*\nhint: datakit .*\n$"
    )
    assert re.search(expected, logs["0"]), logs["0"]
    assert "".join(logs.values()).count("error: ") == 1
    for path in tmp_path.rglob("error.json"):
        assert f"holds token {BAD}" in json.loads(path.read_text())["message"]["message"]
    assert f"holds token {BAD}" in done.stderr  # torchrun shows what the file of the first rank to end says
    assert re.search(r"exitcode +: 2 ", done.stderr)
