"""compare_losses must find a difference where there is one, and only there."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parent.parent.parent / "tools"


def write(path: Path, losses: dict[int, float]) -> Path:
    lines = [{"event": "resume", "step": 0}, *({"step": step, "loss": loss} for step, loss in losses.items())]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def compare(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOLS / "compare_losses.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, 0),
        ({3: 1 + 9e-6}, 0),
        ({3: 1 + 1.1e-5}, 1),
        ({25: 1.5}, 0),  # past the first 20, before the last
        ({30: 1.009}, 0),
        ({30: 1.011}, 1),
        ({3: float("nan")}, 1),
        ({30: float("nan")}, 1),
    ],
)
def test_bounds(tmp_path: Path, changes: dict[int, float], code: int) -> None:
    b = write(tmp_path / "b", dict.fromkeys(range(1, 31), 1.0))
    a = write(tmp_path / "a", dict.fromkeys(range(3, 31), 1.0) | changes)
    done = compare(a, b)
    assert done.returncode == code, done.stdout + done.stderr
    assert "28 common steps, 3 to 30" in done.stdout


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", {1: 1.0}), write(tmp_path / "b", {2: 1.0})
    assert compare(a, b).returncode == 1
    assert compare(a, tmp_path / "missing").returncode == 2
    b.write_text("no json\n")
    assert compare(a, b).returncode == 2


def test_a_line_cut_short_is_left_out(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", {1: 1.0, 2: 1.0}), write(tmp_path / "b", {1: 1.0, 2: 1.0})
    a.write_text(a.read_text() + '{"step": 3, "lo')
    assert compare(a, b).returncode == 0
