"""Finding: files, objects and pipes; one notice on what is not read."""

import os
from pathlib import Path

import pytest

from datakit.text.finding import find
from datakit.text.inputs import find_inputs
from threefold.errors import UserError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("c/a.jsonl", "c/B.JSON.GZ", "c/1.md", "c/2.md", "c/sub/x.csv", "c/.hidden", "c/.git/config", "c/no"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(name)
    return tmp_path


NOTICE = "4 files of other kinds were not read: .md (2), no suffix (1), .csv (1); 2 hidden names were not read"


@pytest.mark.parametrize("place", ["c", "./c/", "local://{}/c"])
def test_what_a_folder_holds_besides_is_named_in_one_notice(folder: Path, place: str) -> None:
    notices: list[str] = []
    found = find_inputs([place.format(folder)], report=notices.append)
    assert [Path(file.path).name for file in found] == ["B.JSON.GZ", "a.jsonl"]
    assert notices == [NOTICE]


def test_many_kinds_are_named_by_number(folder: Path) -> None:
    for number in range(7):
        Path(f"c/x.k{number}").touch()
    assert str(find(["c"]).notice()).startswith("11 files of other kinds were not read: .md (2), ")
    assert ", 5 more kinds; 2 hidden" in str(find(["c"]).notice())


def test_a_glob_leaves_out_what_cannot_be_read_and_says_so(folder: Path) -> None:
    notices: list[str] = []
    assert [file.path for file in find_inputs(["c/*"], report=notices.append)] == ["c/B.JSON.GZ", "c/a.jsonl"]
    assert notices == ["4 files of other kinds were not read: .md (2), no suffix (1), .csv (1)"]
    assert find_inputs(["c/*.jsonl"], report=notices.append)
    assert len(notices) == 1


def test_a_path_through_a_link_is_the_file_that_the_kernel_means(folder: Path) -> None:
    Path("far/here").mkdir(parents=True)
    Path("far/x.txt").write_text("far")
    Path("x.txt").write_text("near")
    Path("link").symlink_to("far/here")
    [found] = find_inputs(["link/../x.txt"])
    with found.open() as file:
        assert file.read() == b"far"
    assert [file.path for file in find_inputs(["link/../x.txt", "far/x.txt", "./x.txt"])] == ["far/x.txt", "x.txt"]


def test_a_pipe_in_a_folder_is_not_waited_for(folder: Path) -> None:
    os.mkfifo("c/late.jsonl")
    Path("c/knot").symlink_to("knot")
    assert find(["c"]).unread["pipe or device"] == 1
    with pytest.raises(UserError, match=r"c/late\.jsonl is a pipe"):
        find_inputs(["c/late.jsonl"])


def test_what_a_command_makes_or_is_given_is_not_its_input(folder: Path) -> None:
    Path("c/tok.json").write_text("{}")
    Path("c/store").mkdir()
    Path("c/store/manifest.json").write_text("{}")
    Path("c/linked").symlink_to("store")
    found = find(["c"], but=["c/./tok.json", "c/store", "c/none"])
    assert found.files == {"c/a.jsonl", "c/B.JSON.GZ"}
    assert found.notice() == NOTICE
    assert find(["c/store", "c/tok.json"]).files == {"c/store/manifest.json", "c/tok.json"}


@pytest.mark.parametrize(
    ("arguments", "repeated"),
    [
        (["c", "c"], "c"),
        (["c/", "./c/sub"], "c/sub"),
        (["c/a.jsonl", "c"], "c/a.jsonl"),
        (["c/*.jsonl", "c/a*"], "c/a.jsonl"),
        (["link/a.jsonl", "c/a.jsonl"], "link/a.jsonl"),
        (["link", "c"], "c"),
        (["local://{}/c", "local://{}/c/a.jsonl"], "local://{}/c/a.jsonl"),
        (["local://{}/c", "local://{}/c"], "local://{}/c"),
        (["c", "."], "c"),
        (["c/**", "c/**/*.jsonl"], "c/a.jsonl"),
        (["c/**"], None),
        (["c/sub", "c/a.jsonl", "c/B.JSON.GZ"], None),
        (["c/.git", "c"], None),
        (["loop"], None),
    ],
)
def test_what_is_named_twice_is_read_once_and_named(folder: Path, arguments: list[str], repeated: str | None) -> None:
    Path("link").symlink_to("c")
    Path("loop").mkdir()
    for name in ("itself", "again"):
        Path(f"loop/{name}").symlink_to("../loop")
    Path("loop/x.jsonl").write_text("{}")
    Path("c/.git/y.jsonl").write_text("{}")
    notices: list[str] = []
    found = find_inputs([argument.format(folder) for argument in arguments], report=notices.append)
    assert len({os.path.realpath(file.path.removeprefix("local://")) for file in found}) == len(found)
    once = [notice for notice in notices if "read once" in notice]
    expected = repeated and f"read once, though named more than once: {repeated.format(folder)}"
    assert once == ([expected] if expected else [])


def test_urls_that_cannot_be_listed_are_faults_beside_the_others(folder: Path) -> None:
    urls = ["s3://bucket/a//b", "ftp://:nowhere.invalid:x/a", "memory://nothing-here"]
    found = find([*urls, "absent.jsonl"])
    said = [fault.message for fault in found.faults]
    assert any("empty part" in text for text in said)
    assert any("absent.jsonl" in text for text in said)
    assert len(said) == len(urls) + 1


def test_many_that_are_named_twice_are_counted(folder: Path) -> None:
    names = [f"c/{number}.txt" for number in range(5)]
    for name in names:
        Path(name).touch()
    assert find([*names, "c"]).once_notice() == (
        "read once, though named more than once: c/0.txt, c/1.txt, c/2.txt and 2 more"
    )
