"""ForeignIndex: fields of an index.json by name and kind; a fault names the file, the place and what was found."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datakit.foreign.foreign_index import ForeignIndex
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
