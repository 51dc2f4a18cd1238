"""Child Pythons: neither they nor a command run by `python -m` import from the current folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.planted import Planted
from threefold.child_python import python_command, search_path

ROOT = Path(__file__).parents[2]


def test_no_folder_of_the_users_is_handed_on(planted: Planted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(planted.folder)
    script = tmp_path / "scripts" / "train.py"
    kept = [str(tmp_path / "libraries"), *sys.path[1:3]]
    entries = ["", ".", "src", str(planted.folder), str(tmp_path / "link"), str(script.parent), *kept]
    monkeypatch.setattr(sys, "path", entries)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None, raising=False)
    assert search_path() == kept


def test_the_current_folder_stays_where_this_program_is_found_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", ["", str(ROOT), "/elsewhere"])
    assert search_path() == [str(ROOT), "/elsewhere"]


def test_a_deleted_current_folder_is_none(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in planted.folder.iterdir():
        path.unlink()
    planted.folder.rmdir()
    monkeypatch.setattr(sys, "path", ["", "/elsewhere"])
    assert search_path() == ["/elsewhere"]


def test_a_child_finds_a_module_and_nothing_planted(planted: Planted) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(search_path())}
    subprocess.run([*python_command("tokenize"), "--help"], env=environment, check=True, capture_output=True)
    assert planted.executed == []


@pytest.mark.parametrize("kit", ["datakit", "ckptkit", "trainer"])
def test_a_command_run_as_a_module_imports_nothing_planted(kit: str, planted: Planted) -> None:
    command = [sys.executable, "-m", kit, "--help"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, check=False)
    assert (done.returncode, planted.executed) == (0, [])
