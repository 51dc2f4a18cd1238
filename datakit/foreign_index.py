"""ForeignIndex: the index.json of an MDS or litdata dataset, read field by field; a fault names the file and field."""

from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import orjson

from datakit.exact_reader import AGAIN, open_binary
from threefold.errors import CheckFailed, StorageError

FILE_NAME = "index.json"
MAX_BYTES = 512 << 20
Kind = TypeVar("Kind")
_NAMES = {str: "a string", int: "a number from 0", dict: "an object", list: "a list"}


class ForeignIndex:
    """One JSON object of an index, with its place in the file."""

    def __init__(self, path: Path, raw: Any, place: str = "") -> None:
        """Wrap an object that was found at `place`."""
        if not isinstance(raw, dict):
            raise CheckFailed(f"{path}: {place.rstrip('.') or 'the index'} is no JSON object", hint=AGAIN)
        self.path, self.place, self.raw = path, place, raw

    @classmethod
    def read(cls, path: Path) -> "ForeignIndex":
        """Read a whole index.json."""
        with open_binary(path) as file:
            try:
                data = file.read(MAX_BYTES + 1)
            except OSError as error:
                raise StorageError(f"cannot read {path}: {error.strerror}", hint=f"ls -l {path}") from error
        if len(data) > MAX_BYTES:
            raise CheckFailed(f"{path} has more than the {MAX_BYTES} bytes that an index may have", hint=AGAIN)
        try:
            return cls(path, orjson.loads(data))
        except orjson.JSONDecodeError as error:
            raise CheckFailed(f"{path} is damaged: {error}", hint=AGAIN) from None

    def get(self, name: str, kind: type[Kind]) -> Kind:
        """A field of this kind."""
        value = self.raw.get(name)
        out_of_range = kind is int and (isinstance(value, bool) or not 0 <= (value or 0) < 2**63)
        if not isinstance(value, kind) or out_of_range:
            shown = repr(value)[:80]
            raise CheckFailed(f"{self.path}: {self.place}{name} is {shown}, {_NAMES[kind]} expected", hint=AGAIN)
        return value

    def table(self, name: str) -> "ForeignIndex":
        """An object inside."""
        return ForeignIndex(self.path, self.raw.get(name), f"{self.place}{name}.")

    def tables(self, name: str) -> "list[ForeignIndex]":
        """A list of objects inside."""
        found = enumerate(self.get(name, list))
        return [ForeignIndex(self.path, raw, f"{self.place}{name}[{i}].") for i, raw in found]

    def texts(self, name: str) -> list[str]:
        """A list of strings."""
        found = self.get(name, list)
        if not all(isinstance(value, str) for value in found):
            raise CheckFailed(f"{self.path}: {self.place}{name} is no list of strings", hint=AGAIN)
        return found

    def file(self, name: str) -> Path:
        """A file beside the index or in a folder there; a name that leads elsewhere is refused."""
        text = self.get(name, str)
        path = PurePosixPath(text)
        if path.is_absolute() or ".." in path.parts or not path.name or "\0" in text:
            raise CheckFailed(f"{self.path}: {self.place}{name} {text[:80]!r} is no file of this folder", hint=AGAIN)
        return self.path.parent / path
