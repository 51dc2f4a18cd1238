"""The whole job, killed with SIGKILL again and again at random moments, saves included, loses and changes nothing.

Also: a storage that takes seconds for each file does not hold the steps up.
"""

import json
import random
import re
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from ckptkit.cli import main as ckptkit
from ckptkit.runs.catalogue import committed_steps
from tests.trainer.support.training import Job, call, curve, kill, last_step, lines
from threefold.storage import open_storage
from tools.fault_proxy import Fault, FaultProxy

NUM_KILLS = 10
NUM_STEPS = 40
WATCHED = ("loss", "grad_norm", "lr", "tokens")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def writers_of(process: psutil.Process) -> list[psutil.Process]:
    """The checkpoint writers below a launcher."""
    found = []
    for child in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "ckptkit.writer" in child.cmdline():
                found.append(child)
    return found


def hash_of(url: str, capsys: pytest.CaptureFixture[str]) -> dict:
    """What `ckptkit hash` says of the last step, its place apart."""
    capsys.readouterr()
    assert ckptkit(["hash", f"{url}/step-{NUM_STEPS:09d}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.pop("url").startswith(url)
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("place", ["local", "s3"])
def test_killed_at_random_moments(
    job_config: Path,
    tmp_path: Path,
    place: str,
    precision: str,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    base = str(tmp_path) if place == "local" else request.getfixturevalue("s3_url")
    arguments = [job_config, "--tp", 2, "--pp", 2, "--train-steps", NUM_STEPS, "--train.precision", precision]
    arguments += ["--save-interval", 2, "--checkpoint.deadline-s", 5]
    if precision == "fp16":  # with void steps, and windows that end between two saves
        arguments += ["--initial-loss-scale", 2**24, "--loss-scale-window", 3]
    Job(4, *arguments, "--save", f"{base}/whole", metrics=tmp_path / "whole.jsonl").run()

    url = f"{base}/run"
    storage = open_storage(url)
    job = Job(4, *arguments, "--save", url, metrics=tmp_path / "run.jsonl")
    moments = random.Random(f"{place} {precision}")
    for number in range(NUM_KILLS):
        before = committed_steps(storage)
        process = job.start()
        try:
            if number % 3 == 2:
                time.sleep(moments.uniform(1, 8))  # wherever that is: importing, resuming, at a step
            else:
                first, wanted = last_step(job.metrics), moments.randrange(1, 4)
                while process.poll() is None and last_step(job.metrics) < min(first + wanted, NUM_STEPS):
                    time.sleep(0.005)
                time.sleep(moments.uniform(0, 0.15))
            writers = writers_of(psutil.Process(process.pid)) if process.poll() is None else []
        finally:
            kill(process)
        if moments.random() < 0.5:
            psutil.wait_procs(writers, timeout=30)  # else the next start meets writers that still finish
        assert process.stdout is not None
        resumed = re.search(r"resumed from step (\d+) of", process.stdout.read())
        if before and resumed:
            assert int(resumed[1]) >= before[-1]
        for step in committed_steps(storage):
            assert ckptkit(["verify", f"{url}/step-{step:09d}"]) == 0, f"step {step} is listed and not whole"
    newest = committed_steps(storage)[-1]
    resumed = re.search(r"resumed from step (\d+) of", job.run())
    assert resumed
    assert int(resumed[1]) >= newest
    for key in WATCHED:
        found, expected = curve(job.metrics, key), curve(tmp_path / "whole.jsonl", key)
        assert found == {step: expected[step] for step in found}, key
        assert set(range(newest + 1, NUM_STEPS + 1)) <= found.keys()
    assert hash_of(url, capsys) == hash_of(f"{base}/whole", capsys)


def test_a_writer_that_outlives_its_trainer_finishes_its_save(
    job_config: Path, s3_proxy: FaultProxy, s3_url: str, tmp_path: Path
) -> None:
    s3_proxy.fault = Fault("delay", method="PUT", delay_s=3.0)
    job = Job(2, job_config, "--pp", 2, "--save", s3_url, "--save-interval", 4, metrics=tmp_path / "m.jsonl")
    process = job.start()
    while last_step(job.metrics) < 5:  # then both ranks have copied what step 4 saves
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.005)
    writers = writers_of(psutil.Process(process.pid))
    kill(process)
    assert committed_steps(open_storage(s3_url)) == []
    assert len(writers) == 2
    _, alive = psutil.wait_procs(writers, timeout=60)
    assert not alive
    assert committed_steps(open_storage(s3_url)) == [4]
    assert "resumed from step 4 of" in job.run()


def test_steps_go_on_beside_a_slow_save(job_config: Path, s3_proxy: FaultProxy, s3_url: str, tmp_path: Path) -> None:
    s3_proxy.fault = Fault("delay", method="PUT", delay_s=5.0)
    flags = ["--save", s3_url, "--save-interval", 150, "--train-steps", 300, "--metrics", tmp_path / "m.jsonl"]
    assert call("train", job_config, *flags) == 0
    first, _ = lines(tmp_path / "m.jsonl", "save")
    assert first["ok"]
    assert first["write_s"] > 10  # a data file and an index, one after the other, then the root
    assert first["stall_s"] < 0.2 * first["write_s"]
    waits = curve(tmp_path / "m.jsonl", "step_s")
    beside = [step for step in waits if step > 150 and sum(waits[s] for s in range(151, step + 1)) < first["write_s"]]
    assert len(beside) > 20
