"""JSON text: the text that one line of JSON holds under the keys that were asked for.

orjson parses. What it refuses and Python's own `json` writes is parsed by that: NaN, Infinity, lone surrogates; also a
line that begins with a byte order mark. Only such lines cost more.
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from datakit.text.formats import SHOWN_BY
from datakit.text.inputs import InputFile
from threefold.errors import UserError, quoted

BOM = "\ufeff"
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_REPLACEMENT = "\ufffd"
_MISSING = object()
_ARRAY = re.compile(rb"\[\s*([\[{\]]|$)")  # of objects or arrays, or empty; `["text"]` is a faulty line


class LineFault(Exception):
    """What is wrong with one document, the byte of it if that is known, and a hint better than to look at it."""

    def __init__(self, message: str, *, byte: int | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message, self.byte, self.hint = message, byte, hint


class JsonText:
    """Finds the text under one or several keys in lines of JSON.

    A key may lead into objects, as `meta.text` does; one that is there as it is spelled wins. `num_replaced` counts the
    texts in which lone surrogates were replaced by U+FFFD; `is_first` is set by the caller: no line of the file was
    read before.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = keys
        self._single = keys[0] if len(keys) == 1 else None
        self.num_replaced, self.is_first = 0, True

    def find(self, content: bytes) -> str | None:
        """Return the text of a line, those of several keys joined by blank lines; None for a blank line.

        Raises LineFault if the line is not a JSON object or has no text under the keys.
        """
        try:
            value = orjson.loads(content)
        except orjson.JSONDecodeError as error:
            return self._find_leniently(content, error)
        if isinstance(value, dict) and isinstance(text := value.get(self._single), str):
            return text
        return self._text(value)

    def find_all(self, lines: bytes) -> list[str] | None:
        """Return the texts of many lines; None if any of them is blank or faulty, or takes more than one plain key."""
        if self._single is None:
            return None
        loads, key = orjson.loads, self._single
        try:
            texts: list[Any] = [loads(line)[key] for line in lines.removesuffix(b"\n").split(b"\n")]
        except (ValueError, KeyError, TypeError, MemoryError):
            return None
        return texts if set(map(type, texts)) == {str} else None

    def _find_leniently(self, content: bytes, error: Exception) -> str | None:
        """Find the text as Python's `json` parses the line, which takes all that it writes."""
        line = decode(content).removeprefix(BOM)  # invalid UTF-8 is reported as what it is
        if not line.strip():
            return None
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            raise LineFault(f"invalid JSON: {error}") from None
        text, num_lone = _LONE_SURROGATE.subn(_REPLACEMENT, self._text(value))
        self.num_replaced += num_lone > 0
        return text

    def _text(self, value: Any) -> str:
        if not isinstance(value, dict):
            raise LineFault("no JSON object")
        values = {key: other for key in self._keys if (other := _lookup(value, key)) is not _MISSING}
        texts = {key: other for key, other in values.items() if other is not None}
        if not texts:
            is_null = values and len(self._keys) == 1
            raise null_text(self._keys[0]) if is_null else _no_key(value, self._keys, after_others=not self.is_first)
        for key, other in texts.items():
            if not isinstance(other, str):
                raise LineFault(f"{key!r} is not text but {type(other).__name__}")
        return "\n\n".join(filter(None, texts.values()))


def require_lines(file: InputFile, head: bytes) -> None:
    """UserError if a file that begins with these bytes is one JSON value over many lines, not an object a line."""
    head = head.removeprefix(BOM.encode()).lstrip()
    first, newline, _ = head.partition(b"\n")
    if _ARRAY.match(head):
        what, convert = "a JSON array", "jq -c '.[]'"
    elif newline and first.startswith(b"{") and first.rstrip().endswith((b"{", b"[", b",")):
        what, convert = "a JSON object over many lines", "jq -c ."
    else:
        return
    hint = f"COMMAND | {convert} | datakit preprocess - ..."
    if not file.spooled:
        others = "or name the other files, such as 'FOLDER/*.jsonl'"
        hint = f"{SHOWN_BY[file.compression]} {quoted(file.path)} | {convert} > NEW.jsonl, {others}"
    raise UserError(f"{file.shown} is {what}, not one JSON object a line", hint=hint)


def decode(content: bytes) -> str:
    """Return UTF-8 as text; LineFault with the byte that is wrong."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise LineFault(f"invalid UTF-8: {error.reason} 0x{content[error.start]:02x}", byte=error.start) from None


def _lookup(value: dict[str, Any], key: str) -> Any:
    """Return what a key leads to, _MISSING if to nothing: {"a": {"b.c": 1}} has `a.b.c`."""
    if key in value:
        return value[key]
    at = key.find(".")
    while at >= 0:
        inner = value.get(key[:at])
        if isinstance(inner, dict) and (found := _lookup(inner, key[at + 1 :])) is not _MISSING:
            return found
        at = key.find(".", at + 1)
    return _MISSING


def null_text(key: str) -> LineFault:
    """Return the fault of a document whose only text is null."""
    return LineFault(f"no text: {key!r} is null", hint="--skip-invalid")


def _no_key(value: dict[str, Any], keys: Sequence[str], *, after_others: bool) -> LineFault:
    asked = " or ".join(map(repr, keys)) + " with a text" * (len(keys) > 1)
    others = ", ".join(map(repr, value)) or "none"
    longest = max(_lengths(value), default=None)
    hint = longest and f"--text-key {longest[1]}"
    if after_others:  # whose key that is not
        hint = "--skip-invalid" + (f", or --text-key {','.join(keys)},{longest[1]}" if longest else "")
    return LineFault(f"no key {asked}; its keys: {others}", hint=hint)


def _lengths(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[int, str]]:
    """Return the length and the key of each text of an object and of the objects right in it."""
    for name, other in value.items():
        if isinstance(other, str):
            yield len(other), f"{prefix}{name}"
        elif isinstance(other, dict) and not prefix:
            yield from _lengths(other, f"{name}.")
