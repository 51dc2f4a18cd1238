"""The notebook of the three journeys: each cell runs in a new folder, and what it printed is not in the file."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = json.loads((ROOT / "examples" / "journeys.ipynb").read_text())
CODE = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_it_is_a_notebook_without_output() -> None:
    assert NOTEBOOK["nbformat"] == 4
    assert len({cell["id"] for cell in NOTEBOOK["cells"]}) == len(NOTEBOOK["cells"])
    for cell in NOTEBOOK["cells"]:
        assert cell.get("outputs", []) == []
        assert cell.get("execution_count") is None
    titles = [cell["source"][0] for cell in NOTEBOOK["cells"] if cell["cell_type"] == "markdown"]
    assert [title[:12] for title in titles[1:]] == ["## Journey 1", "## Journey 2", "## Journey 3"]


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_cell_runs_after_the_one_before(tmp_path: Path) -> None:
    """In one process and one namespace, as a kernel runs them; nothing of Jupyter is needed."""
    program = tmp_path / "cells.py"
    program.write_text("\n".join(CODE))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "config.json" in done.stdout
