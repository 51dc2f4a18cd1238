"""A tiny training job for the tests: stores, configuration, and starting, killing and reading it."""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil

from ckptkit.check.hash import CheckpointHash, hash_checkpoint
from ckptkit.loading.reader import CheckpointReader
from datakit import write_store
from tests.support.checks import require
from threefold.storage import open_storage
from trainer.cli import main

ROOT = Path(__file__).parents[3]
VOCAB_SIZE = 61  # a multiple of no layout: the table is padded
START_WITHIN_S = 120.0
CONFIG = """
[model]
num_layers = 3
hidden_size = 32
num_heads = 4
num_kv_heads = 2
ffn_hidden_size = 48
dropout = 0.1
[data]
stores = ["{folder}/train"]
mask_eod_loss = true
[data.valid]
stores = ["{folder}/valid"]
num_samples = 10
[optim]
lr = 5e-3
[train]
train_steps = 12
seq_length = 32
micro_batch_size = 2
global_batch_size = 16
device = "cpu"
[checkpoint]
deadline_s = 20
"""


def write_stores(folder: Path, *, seed: int = 0) -> None:
    """A training and a validation store of arithmetic progressions, each document ended by the last token."""
    random = np.random.default_rng(seed)
    for name, num_documents in (("train", 300), ("valid", 30)):
        lengths = random.integers(20, 120, num_documents)
        documents = [
            np.r_[(random.integers(0, 60) + random.integers(1, 4) * np.arange(length)) % 60, 60] for length in lengths
        ]
        write_store(folder / name, documents, vocab_size=VOCAB_SIZE, eod_id=60)


def write_config(folder: Path) -> Path:
    """The configuration of a job on the stores in the same folder."""
    path = folder / "job.toml"
    path.write_text(CONFIG.format(folder=folder))
    return path


def hash_of(url: str | Path, step: int) -> CheckpointHash:
    """The content of a step."""
    with CheckpointReader(open_storage(url), step) as reader:
        return hash_checkpoint(reader)


def call(verb: str, *arguments: object) -> int:
    """Run a verb of the trainer in this process; its exit code."""
    return main([verb, *map(str, arguments)])


class Job:
    """One command line under torchrun on one node, that can be started again and again."""

    def __init__(self, num_ranks: int, *arguments: object, metrics: Path, program: str = "trainer") -> None:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        self._command = [*launcher, "-m", program, "train", *map(str, arguments), "--metrics", str(metrics)]
        self.metrics = metrics

    def start(self) -> subprocess.Popen[str]:
        """Start it; the caller waits or kills."""
        return subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True,
        )  # fmt: skip

    def run(self) -> str:
        """Run it to its end; what it said. AssertionError where it failed."""
        code, output = self.outcome(self.start())
        require(code == 0, output)
        return output

    def outcome(self, process: subprocess.Popen[str]) -> tuple[int, str]:
        """Wait for a started process: its exit code and what it said."""
        try:
            output, _ = process.communicate(timeout=240)
        finally:
            kill(process)
        return process.returncode, output

    def run_until_step(self, step: int) -> None:
        """Start it, and kill launcher and ranks with SIGKILL once it has logged a step."""
        process, deadline = self.start(), time.monotonic() + START_WITHIN_S
        try:
            while last_step(self.metrics) < step:
                if process.poll() is not None:
                    raise AssertionError(process.communicate()[0])
                require(time.monotonic() < deadline, f"step {step} was not reached")
                time.sleep(0.01)
        finally:
            kill(process)


def kill(process: subprocess.Popen[str]) -> None:
    """SIGKILL to a launcher and its ranks, as when a node is lost; checkpoint writers have sessions of their own."""
    with suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(process.pid)
        launcher.suspend()  # else it may start a rank after its children are listed
        while launcher.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
            time.sleep(0.001)
        for victim in [*launcher.children(), launcher]:
            victim.kill()
    process.wait()


def lines(path: Path, event: str | None = None) -> list[dict]:
    """The whole step lines of a metrics file, or those of one event."""
    texts = path.read_text().splitlines(keepends=True) if path.exists() else []
    found = [json.loads(text) for text in texts if text.endswith("\n")]
    return [line for line in found if line.get("event") == event]


def last_step(path: Path) -> int:
    """The last step in a metrics file, 0 if there is none."""
    return max((line["step"] for line in lines(path)), default=0)


def curve(path: Path, key: str = "loss") -> dict[int, float]:
    """One number of each step of a metrics file."""
    found = lines(path)
    require(len({line["step"] for line in found}) == len(found), "one line a step")
    return {line["step"]: line[key] for line in found}
