"""Inputs: what names find, in which order, and how work items are cut."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datakit.text.inputs import MAX_ITEM_BYTES, MIN_ITEM_BYTES, InputFile, cut, default_item_bytes, find_inputs
from tests.datakit.conftest import Cli
from threefold.errors import StorageError, UserError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    names = ["b.jsonl", "a.txt", "sub/c.jsonl.gz", "sub/d.txt.zst", "x.md", "sub/.e.txt", ".git/f.txt", "y.jsonl.lz4"]
    for name in names:
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(name)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["."], ["a.txt", "b.jsonl", "sub/c.jsonl.gz", "sub/d.txt.zst"]),
        (["sub", "b.jsonl", "./b.jsonl"], ["b.jsonl", "sub/c.jsonl.gz", "sub/d.txt.zst"]),
        (["*.jsonl"], ["b.jsonl"]),
        (["**/*.txt*"], ["a.txt", "sub/d.txt.zst"]),
        (["s*"], ["sub/c.jsonl.gz", "sub/d.txt.zst"]),
    ],
)
def test_names_are_found_sorted_and_once(folder: Path, arguments: list[str], names: list[str]) -> None:
    assert [file.path for file in find_inputs(arguments)] == names


def test_formats_come_from_names(folder: Path) -> None:
    formats = [(file.kind, file.compression) for file in find_inputs(["."])]
    assert formats == [("txt", ""), ("jsonl", ""), ("jsonl", "gz"), ("txt", "zst")]


def test_a_name_with_glob_characters_is_taken_as_it_is(folder: Path) -> None:
    Path("[a].txt").write_text("x")
    assert [file.path for file in find_inputs(["[a].txt"])] == ["[a].txt"]


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["none.jsonl"], "no such input: none.jsonl"),
        (["*.parquet"], "no such input"),
        (["x.md"], r"x\.md is not text that can be read, by its name"),
        (["y*", "x*"], r"the input is empty: .*2 files of other kinds were not read: \.lz4 \(1\), \.md \(1\)"),
        (["empty"], "the input is empty"),
    ],
)
def test_faulty_names(folder: Path, arguments: list[str], fault: str) -> None:
    os.mkdir("empty")
    with pytest.raises(UserError, match=fault):
        find_inputs(arguments)


@given(lines=st.lists(st.integers(0, 60), max_size=40), last=st.booleans(), item_bytes=st.integers(1, 300))
def test_a_large_file_is_cut_at_line_ends_without_loss(
    tmp_path_factory: pytest.TempPathFactory, lines: list[int], last: bool, item_bytes: int
) -> None:
    content = b"\n".join(b"x" * length for length in lines) + b"\n" * last
    path = tmp_path_factory.mktemp("cut") / "a.jsonl"
    path.write_bytes(content)
    items = list(cut(find_inputs([str(path)]), item_bytes, split_txt=False))
    slices = [part for item in items for part in item.slices]
    assert [item.number for item in items] == list(range(len(items)))
    assert b"".join(content[part.start : part.stop] for part in slices) == content
    assert all(part.start == 0 or content[part.start - 1 : part.start] == b"\n" for part in slices)
    num_parts = -(-len(content) // item_bytes)
    wanted = [len(content) * part // num_parts for part in range(1, num_parts)]
    ends = [content.find(b"\n", offset - 1) + 1 or len(content) for offset in wanted]
    assert [part.stop for part in slices if len(content) > item_bytes] == sorted({*ends, len(content)} if ends else ())
    longest = max(lines, default=0) + 1
    assert all(part.stop - part.start <= item_bytes + longest for part in slices)


def test_small_files_are_grouped_and_compressed_ones_stay_whole() -> None:
    sizes = {"a": ("", 10), "b": ("", 20), "c": ("gz", 500), "d": ("", 40), "e": ("", 40), "f": ("", 60)}
    files = [InputFile(name, "txt", how, size, 0) for name, (how, size) in sizes.items()]
    groups = [[part.file.path for part in item.slices] for item in cut(files, 100, split_txt=False)]
    assert groups == [["a", "b"], ["c"], ["d", "e"], ["f"]]


def test_the_size_of_an_item_depends_on_the_input_alone() -> None:
    def size_of(num_bytes: int) -> int:
        return default_item_bytes([InputFile("a", "jsonl", "", num_bytes, 0)])

    assert size_of(1) == MIN_ITEM_BYTES
    assert size_of(10**9) == 16 << 20
    assert size_of(10**13) == MAX_ITEM_BYTES
    assert all(2 * size_of(num_bytes) < num_bytes / 20 for num_bytes in range(4 * 10**8, 10**10, 7_654_321))


def test_a_folder_that_cannot_be_listed_is_not_passed_over(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = os.scandir

    def refuse(path: str) -> object:
        if str(path).endswith("sub"):
            raise PermissionError(13, "Permission denied", path)
        return listed(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(StorageError, match=r"cannot read .*sub: Permission denied"):
        find_inputs(["."])


def test_a_name_that_is_no_text_is_refused(folder: Path) -> None:
    Path(os.fsdecode(b"\xff.txt")).write_text("x")
    with pytest.raises(UserError, match="is not UTF-8"):
        find_inputs(["."])


FAULTS = {
    "lost.jsonl": "cannot read lost.jsonl: No such file or directory",
    "knot.jsonl": "cannot read knot.jsonl: Too many levels of symbolic links",
    "shut.jsonl": "cannot read shut.jsonl: Permission denied",
    "shut": "cannot read shut: Permission denied",
    os.fsdecode(b"\xff.jsonl"): "the name '\\udcff.jsonl' is not UTF-8",
    "x" * 300: f"no such input: {'x' * 300}",
    "none*": "no such input: none*",
    "local://{}/none": "no such input: local://{}/none",
    "notes.doc": "notes.doc is not text that can be read, by its name",
}


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of two good files and all that cannot be read."""
    monkeypatch.chdir(tmp_path)
    Path("shut").mkdir()
    for name in ("a.jsonl", "b.txt", "shut.jsonl", "notes.doc", os.fsdecode(b"\xff.jsonl")):
        Path(name).write_text('{"text": "x"}\n')
    for link, target in (("lost", "nowhere"), ("knot", "knot.jsonl")):
        Path(f"{link}.jsonl").symlink_to(target)
    opened, listed = os.open, os.scandir

    def refuse(real: Callable[..., Any], path: Any, *rest: int, **more: Any) -> Any:
        if isinstance(path, str) and path.startswith("shut"):
            raise PermissionError(13, "Permission denied", path)
        return real(path, *rest, **more)

    monkeypatch.setattr(os, "open", partial(refuse, opened))  # the superuser may read all
    monkeypatch.setattr(os, "scandir", partial(refuse, listed))
    return tmp_path


def test_all_inputs_that_cannot_be_read_are_named_and_can_be_left_out(faulty: Path) -> None:
    arguments = [name.format(faulty) for name in [*FAULTS, "a.jsonl", "b.txt"]]
    with pytest.raises(StorageError) as caught:
        find_inputs(arguments)
    first, *faults = caught.value.message.splitlines()
    assert first == f"{len(FAULTS)} inputs cannot be read:"
    assert sorted(faults) == sorted(f"  {fault.format(faulty)}" for fault in FAULTS.values())
    assert caught.value.hint == "--skip-unreadable to go on without them"
    lines: list[str] = []
    assert [file.path for file in find_inputs(arguments, report=lines.append, skip_unreadable=True)] == [
        "a.jsonl",
        "b.txt",
    ]
    [line] = lines
    assert line.splitlines() == [f"left out {len(FAULTS)} inputs that cannot be read:", *faults]


@pytest.mark.parametrize("name", FAULTS)
def test_one_that_cannot_be_read_has_a_hint_of_its_own(faulty: Path, name: str) -> None:
    with pytest.raises(UserError) as caught:
        find_inputs([name.format(faulty)])
    assert caught.value.message == FAULTS[name].format(faulty)
    assert isinstance(caught.value, StorageError) == caught.value.message.startswith("cannot read")
    assert str(caught.value.hint).endswith(", or --skip-unreadable to go on without it")
    with pytest.raises(UserError, match="the input is empty"):
        find_inputs([name.format(faulty)], skip_unreadable=True)


def test_a_folder_is_read_without_what_cannot_be(faulty: Path) -> None:
    found = find_inputs(["."], skip_unreadable=True)
    assert [file.path for file in found] == ["a.jsonl", "b.txt"]
    with pytest.raises(StorageError, match=r"^5 inputs cannot be read:"):
        find_inputs(["."])


def test_a_tokenizer_is_trained_without_what_cannot_be_read(
    faulty: Path, cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("train-tokenizer", ".", "a.jsonl", "--vocab-size", 260, "--output", "tok.json")
    assert cli(*words) == 3
    assert "error: 5 inputs cannot be read:" in capsys.readouterr().err
    os.mkfifo("late.jsonl")
    assert cli(*words, "--skip-unreadable") == 0
    err = capsys.readouterr().err
    assert "left out 5 inputs that cannot be read:" in err
    assert "wrote tok.json" in err
