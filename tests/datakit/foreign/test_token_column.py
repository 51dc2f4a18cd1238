"""Token column: the one that is named or the only one that will do; every refusal says what there is."""

import pytest

from datakit.foreign.foreign_index import choose_column, require_dtype
from datakit.foreign.foreign_store import Choices
from threefold.errors import UserError

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
