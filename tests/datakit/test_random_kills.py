"""Commands killed at random moments and run again, as benchmarks/datakit/kill.py does it at length."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.s3_server import find_weed

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_killed_commands_run_again_make_the_same_bytes_and_leave_nothing() -> None:
    if find_weed() is None:
        pytest.skip("the S3 server is not installed")
    program = [sys.executable, "benchmarks/datakit/kill.py", "--rounds", "9", "--seed", "3"]
    environment = os.environ | {"PYTHONPATH": "."}
    done = subprocess.run(
        program, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 faults" in done.stdout
