"""A release: refused where it could not be repeated, and then the same version in every file."""

import subprocess
from pathlib import Path

import pytest

from tools import release

ROOT = Path(__file__).parents[2]


def git(root: Path, *words: str) -> None:
    subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words], cwd=root, check=True, capture_output=True
    )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    for name in (*release.PLACES, "CHANGELOG.md"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text((ROOT / name).read_text())
    (root / "changes").mkdir()
    (root / "changes" / "summary.md").write_text("**You gain** whole rows.\n")
    (root / "changes" / "datakit-rows.md").write_text("fixed: rows of 7 tokens are whole.\n")
    git(tmp_path, "init", "-q", "tree")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "one")
    return root


def test_every_file_gets_the_version_and_the_changelog_the_date(tree: Path) -> None:
    assert release.refused(tree, "7.8.9") is None
    before = {name: (tree / name).read_text() for name in (*release.PLACES, "CHANGELOG.md")}
    texts = release.changed(tree, "7.8.9", "2031-02-03")
    assert texts.keys() == before.keys()
    for name, text in texts.items():
        (tree / name).write_text(text)
        old, new = before[name].splitlines(), text.splitlines()
        if name == "CHANGELOG.md":
            continue
        lines = [pair for pair in zip(old, new, strict=True) if pair[0] != pair[1]]
        assert len(lines) == 1, name
        assert "7.8.9" in lines[0][1]
    assert "## 7.8.9 (2031-02-03)\n" in texts["CHANGELOG.md"]
    assert "\n- datakit: rows of 7 tokens are whole.\n" in texts["CHANGELOG.md"]
    (tree / "changes" / "datakit-rows.md").unlink()
    assert {release.found_in(tree, name) for name in release.PLACES} == {"7.8.9"}
    git(tree, "commit", "-aqm", "release")
    assert "nothing to release" in str(release.refused(tree, "7.9.0"))


def test_a_tree_that_could_not_be_made_again_is_refused(tree: Path) -> None:
    assert "is not a version" in str(release.refused(tree, "next"))
    (tree / "note.txt").write_text("x")
    assert "not committed: ?? note.txt" in str(release.refused(tree, "7.8.9"))
    (tree / "note.txt").unlink()
    (tree / "changes" / "datakit-rows.md").write_text("rows are whole\n")
    git(tree, "commit", "-aqm", "a fragment without its kind")
    assert "datakit-rows.md: an entry begins with one of" in str(release.refused(tree, "7.8.9"))
    (tree / "changes" / "datakit-rows.md").write_text("fixed: rows are whole\n")
    git(tree, "commit", "-aqm", "with it")
    git(tree, "tag", "v7.8.9")
    assert release.refused(tree, "7.8.9") == "v7.8.9 is a tag already"
    (tree / "CITATION.cff").write_text("version: 0.0.9\n")
    git(tree, "commit", "-aqm", "two")
    assert "files have several versions" in str(release.refused(tree, "7.9.0"))


@pytest.mark.parametrize("fails", [False, True])
def test_a_check_that_fails_leaves_the_files_as_they_were(
    tree: Path, fails: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    before, fragment = (tree / "pyproject.toml").read_text(), tree / "changes" / "datakit-rows.md"
    steps = (("true",), ("false",) if fails else ("true",))
    if fails:
        with pytest.raises(SystemExit, match=r"error: false failed; pyproject.toml, .* are as they were"):
            release.main(["7.8.9"], tree, steps)
        assert (tree / "pyproject.toml").read_text() == before
        assert fragment.read_text().startswith("fixed: ")
        return
    assert release.main(["7.8.9"], tree, steps) == 0
    assert "git tag v7.8.9" in capsys.readouterr().out
    assert not fragment.exists()
    assert 'version = "7.8.9"' in (tree / "pyproject.toml").read_text()


def test_an_interrupt_leaves_the_files_as_they_were(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = (*release.PLACES, "CHANGELOG.md", "changes/datakit-rows.md", "changes/summary.md")
    before = {name: (tree / name).read_text() for name in names}
    were_there = []

    def stopped(command: tuple[str, ...], **_: object) -> None:
        were_there.append((tree / "changes" / "datakit-rows.md").exists())
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(release, "refused", lambda *_: None)
        patch.setattr(release.subprocess, "run", stopped)
        with pytest.raises(KeyboardInterrupt):
            release.main(["7.8.9"], tree)
    assert were_there == [False]
    assert {name: (tree / name).read_text() for name in names} == before
