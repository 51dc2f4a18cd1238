"""The demo in float64: after the kill, the reshard and the change of layout, every loss is the uninterrupted run's."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
DEMO = ROOT / "examples" / "demo.py"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_demo_in_float64_agrees_throughout(tmp_path: Path) -> None:
    outside = {"TMPDIR": tmp_path / "tmp", "HOME": tmp_path / "home"}
    for folder in outside.values():
        folder.mkdir()
    done = subprocess.run(
        [sys.executable, DEMO, "--output", tmp_path / "out", "--precision", "fp64",
         "--all-rtol", "1e-8", "--train-steps", "64", "--save-interval", "8"],
        env=os.environ | {name: str(folder) for name, folder in outside.items()} | {"LC_ALL": "C"},
        capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "out" / "losses.png").stat().st_size > 0
    assert done.stdout.count("\nok  ") == 5
    assert not [path for folder in outside.values() for path in folder.rglob("*")]  # all is in its own folder
    assert not (tmp_path / "out" / "tmp").exists()


def test_checks_have_marks_in_plain_letters() -> None:
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    assert spec is not None
    assert spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    lines = demo.table([("a fact", "1", None), ("right", "2", True), ("wrong", "3", False)])
    assert [line.split()[0] for line in lines] == ["a", "ok", "FAILED"]
    assert len({line.index(value) for line, value in zip(lines, "123", strict=True)}) == 1
    assert all(line.isascii() for line in lines)
