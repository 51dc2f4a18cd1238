"""The guide's commands for several nodes, which no test can run as they are: what they would start."""

import itertools
import os
import re
import subprocess
from pathlib import Path

import pytest

from datakit import Recipe, preprocess, train_tokenizer
from tests.datakit.conftest import write_jsonl
from tests.test_guides import ROOT, write_config
from trainer.cli import main as trainer


def test_what_starts_a_run_on_several_nodes_starts_what_the_trainer_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's script with programs of its names, and the command of a node: sizes, and a dry run of the rest."""
    text = (ROOT / "docs" / "guides" / "make-it-fast.md").read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    typed, script = (block for language, block in blocks if not language and "trainer launch" in block)
    write_jsonl(tmp_path / "corpus.jsonl", ["The store holds tokens. " * 20] * 50)
    monkeypatch.chdir(tmp_path)
    train_tokenizer(["corpus.jsonl"], "tok.json", vocab_size=300)
    preprocess(["corpus.jsonl"], "store", Recipe("tok.json", append_eod=True))
    write_config(tmp_path)
    flags = ["--model.num-heads", "8", "--global-batch-size", "16", "--dry-run"]
    programs = {"scontrol": "echo first; echo second", "srun": 'exec "$@"', "trainer": 'printf "%s\\n" "$@" >ran'}
    for name, program in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{program}\n")
        (tmp_path / name).chmod(0o755)
    for commands in (typed.replace("HOST", "first"), script):
        environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "nodes"}
        subprocess.run(["bash", "-eu", "-c", commands], env=environment, check=True)
        words = (tmp_path / "ran").read_text().splitlines()
        at = words.index("train")
        launched = dict(itertools.pairwise(words[1:at]))
        assert launched["--rdzv-endpoint"] == "first:29500"
        assert words[0] == "launch"
        assert trainer([*words[at:], *flags]) == 0
        num_ranks = int(launched["--nnodes"]) * int(launched["--nproc-per-node"])
        assert f" = {num_ranks} ranks" in capsys.readouterr().err
    assert re.findall(r"--(nodes|gpus-per-node)=(\d+)", script) == [("nodes", "2"), ("gpus-per-node", "8")]
