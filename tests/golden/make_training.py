"""Make a run of the trainer with the code that is installed: once for each version of a format, never by a test.

    python tests/golden/make_training.py tests/golden/NAME        # a folder that is not there yet

It holds step 4 of a run, as four ranks would have saved it, its token store and configuration, and in expected.json the
losses with which that version went on from it. v0.1-training has version 1 of the root.
"""

import hashlib
import json
import os
import shutil
import socket
import sys
from pathlib import Path

import numpy as np

import datakit
from ckptkit.cli import main as ckptkit
from trainer.cli import main as trainer

JOB = """
[model]
num_layers = 2
hidden_size = 16
num_heads = 4
num_kv_heads = 2
ffn_hidden_size = 24
tie_embeddings = true
qk_norm = true
dropout = 0.1
[data]
stores = ["tokens"]
mask_eod_loss = true
[optim]
lr = 5e-3
decay_steps = 8
[train]
seq_length = 16
micro_batch_size = 2
global_batch_size = 8
precision = "fp64"
device = "cpu"
"""


def main(folder: Path) -> None:
    """Write a new folder."""
    folder.mkdir(parents=True)
    os.chdir(folder)  # names of files are relative to it, and so of no machine
    socket.gethostname = lambda: "host"  # what a root records of a machine
    random = np.random.default_rng(0)
    documents = [np.r_[random.integers(0, 60, random.integers(5, 60)), 60] for _ in range(60)]
    datakit.write_store("tokens", documents, vocab_size=61, eod_id=60)
    Path("job.toml").write_text(JOB)
    flags = ["train", "job.toml", "--save", "alone/run", "--metrics", "alone/metrics", "--train-steps"]
    assert trainer([*flags, "4"]) == 0
    assert ckptkit(["reshard", "alone/run", "run", "--tp", "2", "--pp", "2"]) == 0
    assert trainer([*flags, "8"]) == 0
    lines = map(json.loads, Path("alone/metrics").read_text().splitlines())
    losses = {line["step"]: line["loss"] for line in lines if "event" not in line}
    shutil.rmtree("alone")
    paths = [path for path in sorted(Path().rglob("*")) if path.is_file()]
    files = {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    Path("expected.json").write_text(json.dumps({"files": files, "losses": losses}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
