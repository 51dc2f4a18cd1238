"""How the project is built: what a machine without a compiler is told, and what a distribution says of itself."""

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")
def test_without_a_compiler_the_build_says_so_in_one_line(tmp_path: Path) -> None:
    nowhere = [f"-DCMAKE_FIND_USE_{place}_PATH=OFF" for place in ("CMAKE_SYSTEM", "SYSTEM_ENVIRONMENT")]
    environment = {name: value for name, value in os.environ.items() if name != "CXX"}
    command = ["cmake", "-S", ROOT, "-B", tmp_path, "-DCMAKE_MAKE_PROGRAM=make", *nowhere]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1
    assert "no C++ compiler: apt install g++ (or dnf install gcc-c++)" in " ".join(done.stderr.split())
    assert "CMAKE_CXX_COMPILER" not in done.stderr


def test_what_a_distribution_says_of_itself() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"Operating System :: POSIX :: Linux", "Typing :: Typed"} <= set(project["classifiers"])
    assert project["requires-python"] == ">=3.11"
    assert {"Homepage", "Documentation", "Source", "Changelog"} <= set(project["urls"])
    from threefold import __version__

    assert project["version"] == __version__
