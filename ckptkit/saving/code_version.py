"""The version of the code that saves: the commit of the git tree a program was started in, read without git.

A tree's `.git` is a folder, or, in a worktree, a file that names one. HEAD there is a commit or names a branch, whose
commit is in a file of its own or in `packed-refs` (gitrepository-layout(5)).
"""

import re
from pathlib import Path

MAX_FILE_BYTES = 16 << 20
_COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")


def git_commit(folder: str | Path = ".") -> str:
    """Return the commit checked out in the git tree around a folder, in hex.

    Empty where there is none or it is unreadable.
    """
    try:
        inner = Path(folder).resolve()
        for place in (inner, *inner.parents):
            if (place / ".git").exists():
                return _head(_git_folder(place))
    except (OSError, ValueError):
        pass
    return ""


def _git_folder(tree: Path) -> Path:
    """Return where a tree's HEAD is."""
    git = tree / ".git"
    return git if git.is_dir() else tree / _read(git).removeprefix("gitdir:").strip()


def _head(git: Path) -> str:
    head = _read(git / "HEAD").strip()
    if not head.startswith("ref:"):
        return _checked(head)
    branch = head.removeprefix("ref:").strip()
    common = git / _read(git / "commondir").strip() if (git / "commondir").exists() else git
    if (common / branch).is_file():
        return _checked(_read(common / branch).strip())
    lines = _read(common / "packed-refs").splitlines()
    return next((_checked(line.partition(" ")[0]) for line in lines if line.partition(" ")[2] == branch), "")


def _read(path: Path) -> str:
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"{path} is too large for a file of git")
    return path.read_text()


def _checked(text: str) -> str:
    return text if _COMMIT.fullmatch(text) else ""
