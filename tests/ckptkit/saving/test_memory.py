"""What a save holds in host memory, trainer and writer together: the state's size or the window, and a constant."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.ckptkit.support.saves import ROOT

STATE_MIB, CONSTANT_MIB = 384, 256


@pytest.mark.slow
@pytest.mark.parametrize("window_mib", [0, 64])
@pytest.mark.parametrize("place", ["local", "s3"])
def test_memory_is_bounded(window_mib: int, place: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    url = str(tmp_path) if place == "local" else request.getfixturevalue("s3_url")
    program = [sys.executable, "-m", "benchmarks.ckptkit.save_memory", "--url", url, "--mib", STATE_MIB]
    run = subprocess.run(
        [*map(str, program), "--window-mib", str(window_mib)], cwd=ROOT, capture_output=True, text=True, check=True,
        timeout=300,
    )  # fmt: skip
    more_mib = float(run.stdout.split(" MiB more")[0].rpartition(" ")[2])
    arena_mib = window_mib or STATE_MIB
    assert arena_mib <= more_mib < arena_mib + CONSTANT_MIB, run.stdout
