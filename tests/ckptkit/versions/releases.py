"""The code of several commits, each in a process of its own that acts on runs when it is asked to."""

import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = Path(__file__).with_name("program.py")
LIBRARY = ("ckptkit", "threefold", "csrc", "CMakeLists.txt")


@dataclass(frozen=True)
class Release:
    """A commit, or this tree with a change: which versions of root and part index its code reads up to, and writes."""

    name: str
    reads: tuple[int, int]
    written: tuple[int, int]
    commit: str = ""
    change: str = ""  # of program.py
    lacks: tuple[str, ...] = ()

    def can_read(self, versions: tuple[int, int]) -> bool:
        """Whether it reads a step of such versions."""
        return versions[0] <= self.reads[0] and versions[1] <= self.reads[1]


HERE = Release("here", (2, 2), (2, 2))
NEXT_ROOT = Release("next root", (3, 3), (3, 2), change="root")
NEXT_INDEX = Release("next index", (3, 3), (2, 3), change="index")
FIRST = Release("first", (1, 1), (1, 1), "3096e3ad", lacks=("rollback",))
SECOND = Release("second", (2, 1), (2, 1), "a67a47fe")


@dataclass
class Answer:
    """What an act returned, or the kinds of its error, most special first, and its text."""

    kinds: list[str]
    text: str

    @property
    def is_done(self) -> bool:
        """Whether it ended well."""
        return not self.kinds


@dataclass
class Process:
    """A process with the code of a release; one thread asks it at a time."""

    release: Release
    child: "subprocess.Popen[str]" = field(repr=False)

    def ask(self, act: str, *arguments: Any) -> Answer:
        """Let it do something, and return what came of it."""
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.write(json.dumps([act, *arguments]) + "\n")
        self.child.stdin.flush()
        line = self.child.stdout.readline()
        assert line, f"the process of {self.release.name} ended with {self.child.wait()}"
        return Answer(**json.loads(line))


@contextmanager
def process_of(release: Release, scratch: Path) -> Iterator[Process]:
    """Start the code of a release, which is built in a folder first if it is of a commit."""
    tree = built(release.commit, scratch / release.name) if release.commit else ROOT
    packages = sysconfig.get_path("purelib")
    plain = ["-S"] if release.commit else []  # no editable install is before the folder then
    words = [sys.executable, *plain, "-P", str(PROGRAM), str(tree), packages, release.change]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        yield Process(release, child)
        assert child.stdin is not None
        child.stdin.close()


def built(commit: str, folder: Path) -> Path:
    """Return a folder with the code of a commit and its native library; skip where history or compiler are missing."""
    if not shutil.which("cmake") or not shutil.which("c++"):
        pytest.skip("needs cmake and c++")
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", commit, *LIBRARY], capture_output=True, check=False)
    if archive.returncode:
        pytest.skip(f"the history has no commit {commit}: git fetch --unshallow")
    if folder.exists():
        return folder
    folder.mkdir(parents=True)
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    build = ["cmake", "-S", str(folder), "-B", str(folder / "build"), "-DTHREEFOLD_CUDA=OFF", "-DTHREEFOLD_INPLACE=ON"]
    subprocess.run(build, check=True, capture_output=True)
    subprocess.run(
        ["cmake", "--build", str(folder / "build"), "--target", "ckptkit_native"], check=True, capture_output=True
    )
    return folder
