"""plot_metrics must draw a readable PNG of several runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.plot_metrics import KILLED, RESUMED, evaluations, marks, points_of

TOOLS = Path(__file__).parent.parent.parent / "tools"


def plot(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOLS / "plot_metrics.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.ci
@pytest.mark.slow
def test_a_plot_of_two_runs(tmp_path: Path) -> None:
    for name in ("a", "b"):
        lines = [{"step": step, "loss": 10 / step} for step in range(1, 30 if name == "a" else 20)]
        lines.insert(5, {"event": "resume", "step": 5})
        text = "".join(json.dumps(line) + "\n" for line in [*lines, {"event": "save", "step": 29}])
        (tmp_path / f"{name}.jsonl").write_text(text + '{"step": 30, "lo')
    output = tmp_path / "plot.png"
    done = plot(tmp_path / "a.jsonl", f"resumed={tmp_path / 'b.jsonl'}", "--output", output)
    assert done.returncode == 0, done.stderr
    assert output.read_bytes().startswith(b"\x89PNG")
    assert plot(tmp_path / "a.jsonl", "--key", "nothing", "--output", output).returncode == 2


def test_evaluations_are_a_curve_of_their_own() -> None:
    lines = [{"step": 1, "loss": 3.0}, {"event": "eval", "step": 1, "loss": 4.0}, {"event": "save", "step": 1}]
    assert evaluations(lines) == [(1, 4.0)]
    assert points_of(lines, "loss") == [(1, 3.0)]


def test_kills_and_resumes_are_marked() -> None:
    steps = [{"step": step, "loss": 1.0} for step in range(1, 30)]
    resume, end = {"event": "resume", "step": 20}, {"event": "end", "step": 29}
    assert marks([*steps, {"event": "save", "step": 29}], 40) == [(29, KILLED)]
    assert marks([*steps, end], 40) == []  # stopped by a signal
    assert marks(steps, 29) == []  # the longest run
    assert marks([*steps[:20], resume, *steps[20:], end], 29) == [(20, RESUMED)]
    assert marks([*steps[:10], {"event": "end", "step": 10}, resume, *steps[20:]], 40) == [(20, RESUMED), (29, KILLED)]
    assert marks([], 40) == []
