"""plot_metrics must draw a readable PNG of several runs."""

import json
import subprocess
import sys
from pathlib import Path

TOOLS = Path(__file__).parent.parent.parent / "tools"


def plot(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOLS / "plot_metrics.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_plot_of_two_runs(tmp_path: Path) -> None:
    for name in ("a", "b"):
        lines = [{"step": step, "loss": 10 / step} for step in range(1, 30)]
        text = "".join(json.dumps(line) + "\n" for line in [*lines, {"event": "save", "step": 29}])
        (tmp_path / f"{name}.jsonl").write_text(text + '{"step": 30, "lo')
    output = tmp_path / "plot.png"
    done = plot(tmp_path / "a.jsonl", f"resumed={tmp_path / 'b.jsonl'}", "--output", output)
    assert done.returncode == 0, done.stderr
    assert output.read_bytes().startswith(b"\x89PNG")
    assert plot(tmp_path / "a.jsonl", "--key", "nothing", "--output", output).returncode == 2
