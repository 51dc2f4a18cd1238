"""Folders: links are followed, each real folder once; paths mean what they mean to the kernel."""

import os
from pathlib import Path

import pytest

from datakit.text.folders import entries_below, matches_of, plain_path


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders `a` and `b/c`, a linked `elsewhere/d` that links back, and loops."""
    monkeypatch.chdir(tmp_path)
    for name in ("a/1", "b/c/2", "elsewhere/d/3", "elsewhere/4"):
        Path("in", name).parent.mkdir(parents=True, exist_ok=True)
        Path("in", name).write_text(name)
    Path("in/elsewhere").rename("elsewhere")
    for link, target in [
        ("in/a/link", "../../elsewhere/d"), ("in/a/0", "../b/c"), ("in/b/loop", ".."), ("in/self", "."),
        ("in/twin", "."), ("elsewhere/d/back", "../../in"), ("in/lost", "nowhere"), ("in/knot", "knot"),
        ("in/b/five", "../a/1"),
    ]:  # fmt: skip
        Path(link).symlink_to(target)
    return tmp_path


def test_each_real_folder_is_read_once_by_the_name_without_links(tree: Path) -> None:
    found = sorted(entry.path for entry in entries_below(["in"]))
    assert found == ["in/a/1", "in/a/link/3", "in/b/c/2", "in/b/five", "in/knot", "in/lost"]
    again = sorted(entry.path for entry in entries_below(["in", "in/b", "elsewhere"]))
    assert again == ["elsewhere/4", "elsewhere/d/3", "in/a/1", "in/b/c/2", "in/b/five", "in/knot", "in/lost"]


def test_globs_over_loops_end(tree: Path) -> None:
    assert [path for path in matches_of("in/**/[0-9]") if Path(path).is_file()] == [
        "in/a/1", "in/a/link/3", "in/b/c/2",
    ]  # fmt: skip
    assert matches_of("in/*/c") == ["in/b/c"]
    assert matches_of("*/d/") == ["elsewhere/d"]
    assert matches_of(f"{tree}/e*/[34]") == [f"{tree}/elsewhere/4"]
    assert matches_of("none/*") == matches_of("in/a/1/*") == []


@pytest.mark.parametrize(
    ("path", "plain"),
    [
        ("./in//a/./1", "in/a/1"), ("in/b/../a/1", "in/a/1"), ("../x", "../x"), ("in/..", "."), ("/../x/", "/x"),
        ("in/a/link/../4", "in/a/link/../4"), ("in/b/five/../1", "in/b/five/../1"),
    ],
)  # fmt: skip
def test_two_points_are_resolved_only_where_no_link_is_before_them(tree: Path, path: str, plain: str) -> None:
    assert plain_path(path) == plain
    if os.path.exists(path):
        assert os.path.samefile(path, plain)
