"""The commit is what git says it is, in every form that git keeps it."""

import shutil
import subprocess
from pathlib import Path

import pytest

from ckptkit.saving.code_version import git_commit

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    git(folder, "commit", "-q", "--allow-empty", "-m", "one")
    return folder


@needs_git
def test_a_branch_a_packed_branch_a_commit_and_a_worktree(tree: Path, tmp_path: Path) -> None:
    (tree / "deep" / "down").mkdir(parents=True)
    commit = git(tree, "rev-parse", "HEAD")
    assert git_commit(tree) == git_commit(tree / "deep" / "down") == commit
    git(tree, "pack-refs", "--all")
    assert git_commit(tree) == commit
    git(tree, "worktree", "add", "-q", "-b", "topic/x", str(tmp_path / "other"))
    git(tmp_path / "other", "commit", "-q", "--allow-empty", "-m", "two")
    second = git(tmp_path / "other", "rev-parse", "HEAD")
    assert second != commit
    assert git_commit(tmp_path / "other") == second
    git(tree, "checkout", "-q", "--detach", second)
    assert git_commit(tree) == second


def test_where_there_is_none_or_it_is_unreadable_it_is_empty(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    assert git_commit(tmp_path) == ""  # also where a tree stands around it
    for head in ("ref: refs/heads/main", "nonsense", ""):
        (tmp_path / ".git/HEAD").write_text(head)
        assert git_commit(tmp_path) == ""
    assert git_commit(tmp_path / "missing" / "folder") == ""
    (tmp_path / ".git/HEAD").write_bytes(b"\xff\xfe")
    assert git_commit(tmp_path) == ""
