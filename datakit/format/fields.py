"""Fields: one JSON object of a file that may be damaged, checked field by field; a fault names file and field."""

import reprlib
from pathlib import Path
from typing import Any, Self, TypeVar

import orjson

from datakit.format.shard import RESTORE_HINT
from threefold.errors import CheckFailed

Value = TypeVar("Value")


class Fields:
    """One JSON object, with its place in the file; every fault is a CheckFailed with the kind's `hint`."""

    hint = RESTORE_HINT

    def __init__(self, path: Path | str, raw: Any, place: str = "") -> None:
        """Wrap what was found at `place`, which is "" or ends with a point."""
        self.path, self.place, self.raw = path, place, raw
        if not isinstance(raw, dict):
            raise self.fault(f"{place.rstrip('.') or 'its content'} is not a JSON object")

    @classmethod
    def parse(cls, path: Path | str, data: bytes) -> Self:
        """Return the object that these bytes of a file are."""
        try:
            return cls(path, orjson.loads(data))
        except orjson.JSONDecodeError as error:
            raise CheckFailed(f"{path} is damaged: {error}", hint=cls.hint) from None

    def text(self, name: str) -> str:
        """Return a string."""
        return self._of(name, str, "a string")

    def number(self, name: str) -> int:
        """Return a whole number from 0 that fits into 63 bits."""
        number = self._of(name, int, "a number from 0")
        if not 0 <= number < 2**63:
            raise self._unexpected(name, "a number from 0")
        return number

    def values(self, name: str) -> list[Any]:
        """Return a list of anything."""
        return self._of(name, list, "a list")

    def texts(self, name: str) -> list[str]:
        """Return a list of strings."""
        values = self.values(name)
        if not all(isinstance(value, str) for value in values):
            raise self.fault(f"{self.place}{name} is not a list of strings")
        return values

    def table(self, name: str) -> Self:
        """Return an object inside."""
        return type(self)(self.path, self.raw.get(name), f"{self.place}{name}.")

    def tables(self, name: str) -> list[Self]:
        """Return a list of objects inside."""
        return [type(self)(self.path, raw, f"{self.place}{name}[{i}].") for i, raw in enumerate(self.values(name))]

    def counts(self, name: str) -> dict[str, int]:
        """Return a table of numbers, empty where it is left out."""
        table = self.table(name) if name in self.raw else None
        return {key: table.number(key) for key in table.raw} if table else {}

    def fault(self, what: str) -> CheckFailed:
        """Return a fault of the file."""
        return CheckFailed(f"{self.path}: {what}", hint=self.hint)

    def _of(self, name: str, kind: type[Value], expected: str) -> Value:
        value = self.raw.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self._unexpected(name, expected)
        return value

    def _unexpected(self, name: str, expected: str) -> CheckFailed:
        return self.fault(f"{self.place}{name} is {reprlib.repr(self.raw.get(name))}, {expected} expected")
