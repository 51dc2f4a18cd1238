"""The changelog of fragments: what changed for a user comes first, nothing is lost, and faults are named."""

import re
from pathlib import Path

import pytest

from tools import changelog

ROOT = Path(__file__).parents[2]
RELEASED = "## 0.1.0 (2030-01-02)\n### Added\n- datakit: the first.\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "changes").mkdir()
    (tmp_path / "changes" / "README.md").write_text("not an entry\n")
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\nA line.\n\n{RELEASED}")
    return tmp_path


def write(tree: Path, name: str, text: str) -> None:
    (tree / "changes" / name).write_text(text)


def test_fragments_become_one_section_with_what_changed_first(tree: Path) -> None:
    write(tree, "summary.md", "**You gain** rows.\n")
    write(tree, "ckptkit-rows.md", "fixed: a row\nis whole.\n\nfaster: a row, by much.\n")
    write(tree, "threefold-rows.md", "added: rows.\nchanged: `rows` is `--rows`.\n")
    assert changelog.faults(tree) == []
    text = changelog.assembled(tree, "0.2.0 (2031-02-03)")
    lines = [line for line in text.splitlines() if line]
    assert lines == [
        "# Changelog",
        "A line.",
        "## 0.2.0 (2031-02-03)",
        "**You gain** rows.",
        f"### {changelog.KINDS['changed']}",
        "- threefold: `rows` is `--rows`.",
        "### Added",
        "- threefold: rows.",
        "### Faster",
        "- ckptkit: a row, by much.",
        "### Fixed",
        "- ckptkit: a row is whole.",
        *RELEASED.splitlines(),
    ]


def test_a_section_that_is_not_released_is_completed(tree: Path) -> None:
    open_section = "## 0.2.0 (unreleased)\nGain.\n\n### Added\n- trainer: one\n  thing.\n\n"
    (tree / "CHANGELOG.md").write_text(f"# Changelog\n\n{open_section}{RELEASED}")
    write(tree, "datakit-two.md", "added: two.\n")
    text = changelog.assembled(tree, "0.2.0 (2031-02-03)")
    assert "### Added\n- trainer: one thing.\n- datakit: two.\n" in text
    assert "unreleased" not in text
    assert text.endswith(RELEASED)


def test_an_entry_that_was_written_into_the_changelog_is_seen(tree: Path) -> None:
    assert changelog.strays(tree) == []
    stray = "## 0.2.0 (unreleased)\n- datakit: new.\n**You gain**:\n- rows\n\n"
    (tree / "CHANGELOG.md").write_text(f"# Changelog\n\n{stray}{RELEASED}")
    assert changelog.strays(tree) == ["- datakit: new."]


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("pack.md", "fixed: x\n", "the name is KIT-WORD.md"),
        ("numpy-pack.md", "fixed: x\n", "the name is KIT-WORD.md"),
        ("datakit-pack.md", "pack is mended\n", "begins with one of changed, added, faster, fixed"),
        ("datakit-pack.md", "fixed:\n", "begins with one of"),
        ("datakit-pack.md", " \n", "is empty"),
        ("datakit-pack.md", "fixed: " + "word " * 90, "at most 80 words"),
        ("summary.md", "line\n" * 31, "more than 30 lines"),
    ],
)
def test_a_fragment_is_refused_by_its_fault(tree: Path, name: str, text: str, fault: str) -> None:
    write(tree, name, text)
    [found] = changelog.faults(tree)
    assert found.startswith(f"changes/{name}")
    assert fault in found


def test_a_release_without_changes_or_a_summary_is_refused(tree: Path) -> None:
    with pytest.raises(ValueError, match="no fragment"):
        changelog.assembled(tree, "0.2.0")
    write(tree, "datakit-two.md", "added: two.\n")
    with pytest.raises(ValueError, match="does not say what a user gains"):
        changelog.assembled(tree, "0.2.0")


def test_the_changelog_here_is_one_that_can_be_released() -> None:
    assert changelog.faults(ROOT) == []
    text = (ROOT / "CHANGELOG.md").read_text()
    first_screen = "\n".join(text.splitlines()[:30])
    assert "You gain" in first_screen
    assert f"### {changelog.KINDS['changed']}" in first_screen
    if not changelog.fragments(ROOT) and not changelog.UNRELEASED.search(text):
        return  # it has just been released
    assembled = changelog.assembled(ROOT, "0.1.0 (unreleased)")
    items = re.findall(r"^- (.+)$", assembled, re.MULTILINE)
    assert len(items) == len(set(items)), "an entry is there twice"
    assert len(items) >= len(re.findall(r"^- ", text, re.MULTILINE))
