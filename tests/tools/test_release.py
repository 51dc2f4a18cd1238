"""A release: refused where it could not be repeated, and then the same version in every file."""

import os
import signal
import subprocess
import sys
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


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_leaves_the_files_as_they_were_and_ends_the_step(tree: Path, name: str) -> None:
    names = (*release.PLACES, "CHANGELOG.md", "changes/datakit-rows.md", "changes/summary.md")
    before = {name: (tree / name).read_text() for name in names}
    step = ("sh", "-c", "echo $$ $(ls changes); exec sleep 100")
    reset = "for each in release.SIGNALS: signal.signal(each, signal.SIG_DFL)"  # whatever runs the tests ignores some
    call = f"release.main(['7.8.9'], Path({str(tree)!r}), {(step,)})"
    program = f"import signal\nfrom pathlib import Path\nfrom tools import release\n{reset}\n{call}"
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("+ sh -c")
        child, *left = process.stdout.readline().split()
        assert left == []  # the fragments are used
        process.send_signal(signal.Signals[name])
        _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert said == f"error: {name} ended the release; the files are as they were\n"
    assert {name: (tree / name).read_text() for name in names} == before
    with pytest.raises(ProcessLookupError):
        os.kill(int(child), 0)


def test_a_signal_while_a_step_starts_ends_it_too(tree: Path) -> None:
    """The signal comes when the step's process is there, and Popen has not returned it."""
    step = ("sh", "-c", "echo $$; exec sleep 100")
    program = f"""
import os, signal, subprocess
from pathlib import Path
from tools import release

def begin(self, *words, start=subprocess.Popen.__init__, **options):
    start(self, *words, **options)
    if words[0] == {step}:
        os.kill(os.getpid(), signal.SIGTERM)

signal.signal(signal.SIGTERM, signal.SIG_DFL)
subprocess.Popen.__init__ = begin
release.main(["7.8.9"], Path({str(tree)!r}), ({step},))
"""
    words = [sys.executable, "-c", program]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("+ sh -c")
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    with pytest.raises(ProcessLookupError):
        os.kill(int(said or 0) or 2**22, 0)


def test_what_nohup_ignores_does_not_end_a_release(tree: Path) -> None:
    used = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert release.main(["7.8.9"], tree, (("sh", "-c", "kill -HUP $PPID"),)) == 0
    finally:
        signal.signal(signal.SIGHUP, used)
    assert not (tree / "changes" / "datakit-rows.md").exists()
