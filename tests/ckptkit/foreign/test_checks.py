"""Foreign data that is not sound is one error, whatever it leads to."""

from pathlib import Path
from typing import Any

import pytest

from ckptkit.foreign.checks import checked, inner_file, row_of_sizes, size_of
from threefold.errors import CheckFailed, StorageError, UserError
from threefold.storage import open_storage


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (KeyError("a"), "it has no 'a'"),
        (EOFError(), "it ends too early"),
        (RecursionError("deep"), "deep"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), "'utf-8' codec"),
    ],
)
def test_what_data_leads_to_is_damage(error: Exception, words: str) -> None:
    with pytest.raises(CheckFailed, match=r"^x is not sound: ") as caught, checked("x is not sound", "fetch x"):
        raise error
    assert words in caught.value.message
    assert caught.value.hint == "fetch x"


@pytest.mark.parametrize("error", [UserError("a"), StorageError("b"), AssertionError("c")])
def test_errors_of_ours_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, checked("x is not sound"):
        raise error
    assert caught.value is error


@pytest.mark.parametrize("value", [3, "12", None, [1, -1], [True], [1.0], [1 << 48]])
def test_what_is_not_a_row_of_sizes_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="is not a row of sizes"):
        row_of_sizes(value)


@pytest.mark.parametrize("name", ["", "a//b", "../a", "a/..", "/a", "a/./b", 3, None])
def test_no_name_leads_out_of_the_folder(name: Any) -> None:
    assert inner_file("a/b.pt") == "a/b.pt"
    with pytest.raises(ValueError, match="is not a file of the folder"):
        inner_file(name)


def test_a_file_that_is_missing_or_too_large_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"four")
    storage = open_storage(tmp_path)
    assert size_of(storage, "a", 4) == 4
    with pytest.raises(CheckFailed, match="a has 4 bytes, more than such a file may have"):
        size_of(storage, "a", 3)
    with pytest.raises(CheckFailed, match="b is missing"):
        size_of(storage, "b")
