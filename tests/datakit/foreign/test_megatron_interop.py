"""Megatron's own IndexedDataset reads our shards and we read its datasets; megatron-core comes from PyPI."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_megatron_and_datakit_read_each_other(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", tmp_path / "m", "megatron-core"]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("megatron-core cannot be installed from here")
    done = subprocess.run(
        [sys.executable, "benchmarks/datakit/megatron_interop.py", "--megatron", tmp_path / "m"],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok ") == 4
