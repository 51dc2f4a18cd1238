"""JSON text: all that Python's json writes, nested keys, and files that are not lines."""

import json
from pathlib import Path

import pytest

from datakit.text.documents import DocumentReader, DocumentRules
from datakit.text.inputs import FileSlice, find_inputs
from datakit.text.json_text import JsonText, LineFault
from threefold.errors import UserError


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"text": "x", "score": float("nan"), "low": float("-inf"), "high": float("inf")}, "x"),
        ({"text": "a\ud800b\udc00", "id": 1}, "a\ufffdb\ufffd"),
        ({"text": "\U0001f642"}, "\U0001f642"),
    ],
)
def test_what_pythons_json_writes_is_read(value: dict[str, object], text: str) -> None:
    finder = JsonText(["text"])
    assert finder.find(json.dumps(value).encode()) == text
    assert finder.num_replaced == ("\ufffd" in text)


def test_byte_order_marks_begin_a_line_or_are_a_blank_one() -> None:
    finder = JsonText(["text"])
    assert finder.find(b'\xef\xbb\xbf{"text": "x"}\n') == "x"
    assert finder.find(b"\xef\xbb\xbf\n") is None
    with pytest.raises(LineFault, match="invalid JSON"):
        finder.find(b'\xef\xbb\xbf{"text": NaNa}')
    with pytest.raises(LineFault, match="invalid JSON"):
        finder.find(b"[" * 100_000)


@pytest.mark.parametrize(
    ("value", "key", "text"),
    [
        ({"meta": {"text": "x"}}, "meta.text", "x"),
        ({"meta": {"text": "x"}, "meta.text": "literal"}, "meta.text", "literal"),
        ({"a": {"b.c": "x"}, "a.b": {"d": 1}}, "a.b.c", "x"),
        ({"a": {"b": "body"}, "t": "title"}, "t,a.b", "title\n\nbody"),
        ({"a": {"b": None}, "t": "title"}, "t,a.b", "title"),
        ({"a": "text", "t": "title"}, "t,a.b", "title"),
    ],
)
def test_keys_lead_into_objects_and_a_literal_point_wins(value: dict[str, object], key: str, text: str) -> None:
    assert JsonText(key.split(",")).find(json.dumps(value).encode()) == text


def test_a_missing_key_hints_at_the_longest_text_also_inside() -> None:
    with pytest.raises(LineFault, match="no key 'text'; its keys: 'id', 'meta'") as caught:
        JsonText(["text"]).find(b'{"id": "1", "meta": {"body": "long text"}}')
    assert caught.value.hint == "--text-key meta.body"


def test_a_null_is_not_a_text() -> None:
    with pytest.raises(LineFault, match=r"^no text: 'meta\.text' is null$") as caught:
        JsonText(["meta.text"]).find(b'{"id": "1", "meta": {"text": null}}')
    assert caught.value.hint == "--skip-invalid"


@pytest.mark.parametrize("skip_invalid", [False, True])
@pytest.mark.parametrize("text", ["x", "x" * 300_000])
@pytest.mark.parametrize(
    ("content", "what"),
    [
        (lambda text: json.dumps([{"text": text}] * 3), "a JSON array"),
        (lambda text: json.dumps([{"text": text}] * 3, indent=1), "a JSON array"),
        (lambda text: json.dumps({"text": text}, indent=2), "a JSON object over many lines"),
        (lambda text: "\ufeff\n[]", "a JSON array"),
    ],
)
def test_a_file_of_one_value_is_refused_by_name(
    tmp_path: Path, content: "object", what: str, text: str, skip_invalid: bool
) -> None:
    path = tmp_path / "a.json"
    path.write_text(content(text))  # type: ignore[operator]
    [file] = find_inputs([str(path)])
    middle = path.read_bytes().find(b"\n") + 1
    slices = [FileSlice(file, 0, file.size_bytes)] + [FileSlice(file, middle, file.size_bytes)] * (middle > 0)
    for part in slices[: 1 if skip_invalid else 2]:
        with pytest.raises(UserError, match=rf"a\.json is {what}, not one JSON object a line") as caught:
            list(DocumentReader(part, DocumentRules(skip_invalid=skip_invalid)))
        assert "jq -c" in (caught.value.hint or "")
