"""Trees that were looked at in one part are not counted in the next."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.power_loss import in_parts
from tests.power_loss.in_parts import Parts
from tests.support.strace import needs_strace

ROOT = Path(__file__).parents[2]
pytestmark = [needs_strace, pytest.mark.slow, pytest.mark.ci]


def part(folder: Path, minutes: float) -> dict[str, Any]:
    """Go on with the results of a folder and return them."""
    command = [sys.executable, "-m", "tests.power_loss.in_parts", folder, "--minutes", str(minutes), "store"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return dict(json.loads((folder / "results.json").read_text()))


def test_parts_go_on_and_count_no_tree_twice(tmp_path: Path) -> None:
    first = part(tmp_path / "trees", 0.05)
    again = part(tmp_path / "trees", 0.05)
    assert again["parts"] > first["parts"] > 0
    assert again["trees"] >= first["trees"] > 2
    keys = (tmp_path / "trees/seen").read_bytes()
    assert len({keys[at : at + 16] for at in range(0, len(keys), 16)}) == again["trees"] == len(keys) / 16
    assert again["planted"] == again["parts"]
    assert again["wrong"] == 0
    assert again["planted_and_not_found"] == []


def test_a_broken_promise_is_counted_with_its_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts(tmp_path / "trees", float("inf"))
    monkeypatch.setattr(in_parts, "fault_of", lambda *words, once_more: "gone" if words[-1] else "")
    parts.go_on("store", 0)
    results = parts.results
    assert 0 < results.wrong < results.trees
    assert sum(results.faults.values()) == results.wrong
    assert all(name.startswith("store, ") for name in results.faults)


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.power_loss.in_parts", tmp_path / "trees", "none of them"]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert (done.returncode, "no program is named none of them" in done.stderr) == (2, True)
    assert not (tmp_path / "trees").exists()
