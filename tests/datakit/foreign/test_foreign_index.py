"""ForeignIndex: fields of an index.json by name and kind, and the column of tokens; a fault says what there is."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datakit.foreign.foreign_index import ForeignIndex, choose_column, require_dtype
from datakit.foreign.foreign_store import Choices
from threefold.errors import CheckFailed, UserError


def read(folder: Path, text: str) -> ForeignIndex:
    (folder / "index.json").write_text(text)
    return ForeignIndex.read(folder / "index.json")


def test_fields_are_checked_and_a_fault_says_what_to_do(tmp_path: Path) -> None:
    inner = read(tmp_path, '{"l": [{"n": -1}]}').tables("l")[0]
    with pytest.raises(CheckFailed, match=r"index\.json: l\[0\]\.n is -1") as caught:
        inner.number("n")
    assert caught.value.hint == "copy or download it again"


@pytest.mark.parametrize("name", ["../a", "/a", "a/../../b", "", ".", "a\\u0000b"])
def test_a_file_outside_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckFailed, match="is not a file of this folder"):
        read(tmp_path, f'{{"f": "{name}"}}').file("f")
    assert read(tmp_path, '{"f": "0/shard.mds"}').file("f") == tmp_path / "0" / "shard.mds"


def test_a_file_that_is_no_index_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is missing"):
        ForeignIndex.read(tmp_path / "index.json")
    with pytest.raises(CheckFailed, match="is damaged"):
        read(tmp_path, "{")
    with pytest.raises(CheckFailed, match="its content is not a JSON object"):
        read(tmp_path, "[]")
    with pytest.raises(CheckFailed, match="more than the 1 bytes"):
        ForeignIndex.read(tmp_path / "index.json", max_bytes=1)


@given(data=st.binary(max_size=60))
def test_no_bytes_crash_it(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("i") / "index.json"
    path.write_bytes(data)
    try:
        found = ForeignIndex.read(path)
    except CheckFailed as error:
        shown = error.message
    else:
        shown = str(found.path)
    assert str(path) in shown


COLUMNS = [("url", "str"), ("ids", "int32"), ("mask", "int32"), ("meta", "pkl")]


def choose(columns: list[tuple[str, str]], column: str | None = None) -> int:
    choices = Choices("tok.json", column=column)
    return choose_column("a.json", "column", columns, "int32".__eq__, choices, kinds="int32", how="write int32")


def test_the_column_is_the_one_that_is_named_or_the_only_one_that_will_do() -> None:
    assert choose(COLUMNS, "mask") == 2
    assert choose(COLUMNS[:2]) == 1


@pytest.mark.parametrize(
    ("columns", "column", "fault", "hint"),
    [
        (COLUMNS, None, r"more than one column that may hold tokens: url \(str\), ids", "--column ids"),
        (COLUMNS, "x", "no column 'x', it has url", "choose another --column"),
        (COLUMNS, "url", "column 'url' is str; tokens are int32", "write int32"),
        (COLUMNS, "meta", "column 'meta' is pkl; pickle is never loaded", "write int32"),
        (COLUMNS[3:], None, r"no column that may hold tokens: meta \(pkl\); pickle is never loaded", "write int32"),
        ([], None, "no column that may hold tokens: none", "write int32"),
    ],
)
def test_a_refusal_says_what_there_is(
    columns: list[tuple[str, str]], column: str | None, fault: str, hint: str
) -> None:
    with pytest.raises(UserError) as caught:
        choose(columns, column)
    assert caught.match(fault)
    assert caught.value.hint == hint


def test_raw_bytes_need_a_dtype_and_others_bear_no_second_one() -> None:
    with pytest.raises(UserError, match="raw bytes, which do not say"):
        require_dtype("a", "bytes", Choices("t"), is_raw=True)
    with pytest.raises(UserError, match="a is int32, not int64"):
        require_dtype("a", "int32", Choices("t", dtype="int64"), is_raw=False)
    require_dtype("a", "bytes", Choices("t", dtype="int64"), is_raw=True)
    require_dtype("a", "int32", Choices("t", dtype="int32"), is_raw=False)
