"""The Triton kernel of experts' gradients, in Triton's interpreter, against float64."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.trainer.support.training import ROOT


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton: pip install triton")
def test_sums_are_those_of_float64_with_any_rows_of_an_expert() -> None:
    command = [sys.executable, "-m", "tests.trainer.support.grouped_triton"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    gaps = json.loads(done.stdout.splitlines()[-1])
    assert len(gaps) == 10
    assert max(gaps.values()) < 1e-6, gaps
