"""Fields: what is there is given, what is missing or of another kind is named with its place, and nothing crashes."""

from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datakit.format.fields import Fields
from threefold.errors import CheckFailed


def parse(text: str) -> Fields:
    return Fields.parse("a.json", text.encode())


def test_fields_of_their_kind_are_given() -> None:
    fields = parse('{"n": 3, "t": "x", "l": [{"n": 1}], "s": ["a"], "o": {"p": {"n": 2}}, "c": {"k": 4}}')
    assert (fields.number("n"), fields.text("t"), fields.texts("s")) == (3, "x", ["a"])
    assert fields.tables("l")[0].number("n") == 1
    assert fields.table("o").table("p").number("n") == 2
    assert (fields.counts("c"), fields.counts("none")) == ({"k": 4}, {})


@pytest.mark.parametrize(
    ("read", "fault"),
    [
        (lambda fields: fields.number("none"), "none is None, a number from 0 expected"),
        (lambda fields: fields.number("big"), "big is 9223372036854775808, a number"),
        (lambda fields: fields.number("yes"), "yes is True, a number"),
        (lambda fields: fields.text("l"), r"l is \[.*\], a string expected"),
        (lambda fields: fields.values("t"), "t is 'x', a list expected"),
        (lambda fields: fields.texts("s"), "s is not a list of strings"),
        (lambda fields: fields.tables("l"), r"l\[1\] is not a JSON object"),
        (lambda fields: fields.table("l"), "l is not a JSON object"),
        (lambda fields: fields.table("o").table("p").number("n"), r"o\.p\.n is -1"),
        (lambda fields: fields.counts("o"), r"o\.p is \{'n': -1\}, a number"),
    ],
)
def test_a_field_of_another_kind_is_named(read: Callable[[Fields], object], fault: str) -> None:
    text = '{"big": 9223372036854775808, "yes": true, "t": "x", "l": [{}, 4], "s": ["a", 2], "o": {"p": {"n": -1}}}'
    with pytest.raises(CheckFailed, match=rf"^a\.json: {fault}") as caught:
        read(parse(text))
    assert caught.value.hint


@given(data=st.binary(max_size=60))
def test_no_bytes_crash_it(data: bytes) -> None:
    with suppress(CheckFailed):
        assert isinstance(Fields.parse("a.json", data).raw, dict)
