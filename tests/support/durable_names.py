"""Which names a loss of power could take back: those that no fsync of their folder saw, of any process that noted it.

The model is the worst that a file system may do. An entry of a folder is durable once an fsync of the folder began
after it was made; a process that is killed in between leaves it visible, and another must not build on it.
"""

import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.checks import require
from threefold.storage import folders, is_temporary

KILLED, MOST = 77, 99  # a process's exit code, and its fsyncs


class DurableNames:
    """The entries below a folder that are durable; fsyncs of processes that are forked later count too.

    Nothing waits for a disk. `kill_at` ends a process before one of its fsyncs. `on_commit` lists, whenever a file of
    one of the names in `commits` gets its name, what was not durable just before.
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, commits: tuple[str, ...] = ()) -> None:
        self.folder, self._log = folder, folder.with_name(f"{folder.name}.fsyncs")
        self.num_fsyncs, self.kill_at, self.on_commit = 0, -1, list[str]()
        self._commits = commits
        patch.setattr(os, "fsync", self._noted)
        for name in ("unlink", "rmdir"):
            patch.setattr(os, name, self._forgetting(getattr(os, name)))
        for name in ("link", "replace"):
            patch.setattr(os, name, self._watched(getattr(os, name)))

    def forget(self) -> None:
        """Take nothing for durable any more, in this process either."""
        folders._durable.clear()
        self._log.write_text("")
        self.on_commit.clear()

    def lost(self) -> list[str]:
        """Return the entries that are visible and not durable, hidden files left out."""
        durable: dict[str, int] = {}
        if self._log.exists():
            for line in self._log.read_text().splitlines():
                durable |= json.loads(line)
        lost = [path for path in self._entries() if durable.get(str(path)) != path.lstat().st_ino]
        return sorted(str(path.relative_to(self.folder)) for path in lost)

    def each_kill(self, begin: Callable[[Path], object], work: Callable[[Path], object]) -> Iterator[Path]:
        """Yield a fresh folder for every fsync that work in it was killed before, and for the work that ended.

        `begin` prepares the folder.
        """
        for number in range(MOST):
            folder = self.folder / f"try-{number}"
            self.forget()
            begin(folder)
            was_killed = self._in_a_child(lambda folder=folder: work(folder), number)  # type: ignore[misc]
            self.on_commit.clear()
            yield folder
            shutil.rmtree(folder)
            if not was_killed:
                return
        pytest.fail(f"more than {MOST} fsyncs")

    def _in_a_child(self, work: Callable[[], object], kill_at: int) -> bool:
        """Do work in a process that is killed before its n-th fsync; return whether it was."""
        child = os.fork()
        if not child:
            code = 1
            try:
                self.num_fsyncs, self.kill_at = 0, kill_at
                work()
                code = 0
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        require(code in (0, 1, KILLED), f"the process ended with {code}")
        return code == KILLED

    def _entries(self) -> Iterator[Path]:
        for folder, inner, files in os.walk(self.folder):
            yield from (Path(folder, name) for name in (*inner, *files) if not is_temporary(name))

    def _noted(self, descriptor: int) -> None:
        if self.num_fsyncs == self.kill_at:
            os._exit(KILLED)
        self.num_fsyncs += 1
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            folder = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if folder.is_relative_to(self.folder):
                inodes = dict[str, int]()
                for entry in folder.iterdir():
                    with suppress(FileNotFoundError):  # another thread has renamed it
                        inodes[str(entry)] = entry.lstat().st_ino
                self._note(inodes)

    def _forgetting(self, remove: Callable[..., None]) -> Callable[..., None]:
        """Return what removes a name, whose inode the next file may have."""

        def act(path: Any, *, dir_fd: int | None = None) -> None:
            remove(path, dir_fd=dir_fd)
            folder = "" if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
            self._note({os.path.join(folder, path): 0})

        return act

    def _note(self, inodes: dict[str, int]) -> None:
        with self._log.open("a") as log:
            log.write(json.dumps(inodes) + "\n")

    def _watched(self, name_it: Callable[..., None]) -> Callable[..., None]:
        def act(source: Any, target: Any, **options: Any) -> None:
            if os.path.basename(target) in self._commits:
                self.on_commit += self.lost()
            name_it(source, target, **options)

        return act
