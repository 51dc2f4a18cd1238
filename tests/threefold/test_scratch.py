"""A program empties only a folder that it made itself."""

import subprocess
import sys
from pathlib import Path

import pytest

from threefold.errors import UserError
from threefold.scratch import MARKER, fresh_folder

ROOT = Path(__file__).parents[2]


def test_a_folder_of_its_own_is_emptied_and_made_again(tmp_path: Path) -> None:
    kept_file = tmp_path / "kept.txt"
    kept_file.write_text("mine")
    out = fresh_folder(tmp_path / "a" / "out", "demo.py")
    (out / "deep" / "er").mkdir(parents=True)
    (out / "link").symlink_to(kept_file)
    (out / "folder-link").symlink_to(tmp_path)
    assert fresh_folder(out, "demo.py") == out
    assert [path.name for path in out.iterdir()] == [MARKER]
    assert kept_file.read_text() == "mine"


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert (fresh_folder(tmp_path / "out", "demo.py") / MARKER).is_file()


def test_a_folder_of_anyone_else_stays_as_it_is(tmp_path: Path) -> None:
    others, bare, file, link = (tmp_path / name for name in ("others", "bare", "file", "link"))
    fresh_folder(others, "gpu.py")
    bare.mkdir()
    (bare / "thesis.tex").write_text("mine")
    file.write_text("mine")
    link.symlink_to(fresh_folder(tmp_path / "out", "demo.py"))
    planted = tmp_path / "planted"
    (planted / MARKER).mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    for folder, why in [(others, "such as"), (bare, "thesis.tex"), (file, "not a folder"), (link, "not a folder"),
                        (planted, MARKER)]:  # fmt: skip
        with pytest.raises(UserError, match=why) as caught:
            fresh_folder(folder, "demo.py")
        assert caught.value.hint
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("program", ["examples/demo.py", "benchmarks/trainer/gpu.py"])
def test_a_program_refuses_a_folder_that_it_did_not_make(program: str, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    command = [sys.executable, ROOT / program, "--output", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {tmp_path} holds files that {Path(program).name} did not make")
    assert "\nhint: " in done.stderr
    assert (tmp_path / "thesis.tex").read_text() == "mine"
