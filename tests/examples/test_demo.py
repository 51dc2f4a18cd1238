"""The demo in float64: after the kill, the reshard and the change of layout, every loss is the uninterrupted run's."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_demo_in_float64_agrees_throughout(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "demo.py", "--output", tmp_path / "out", "--precision", "fp64",
         "--all-rtol", "1e-8", "--train-steps", "64", "--save-interval", "8"],
        capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "out" / "losses.png").stat().st_size > 0
