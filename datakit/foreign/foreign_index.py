"""ForeignIndex: the index.json of an MDS or litdata dataset, read field by field; a fault names the file and field."""

import os
from pathlib import Path, PurePosixPath
from typing import Self

from datakit.files.durable import reading
from datakit.foreign.exact_reader import AGAIN, damaged, open_binary
from datakit.format.fields import Fields
from threefold.errors import UserError, quoted

FILE_NAME = "index.json"
MAX_BYTES = 512 << 20


def index_of(source: str | os.PathLike[str]) -> Path:
    """Return the index.json of a folder, or itself."""
    path = Path(source)
    return path if path.name == FILE_NAME else path / FILE_NAME


class ForeignIndex(Fields):
    """One JSON object of an index, with its place in the file."""

    path: Path
    hint = AGAIN

    @classmethod
    def read(cls, path: Path, *, max_bytes: int = MAX_BYTES) -> Self:
        """Read a whole index.json."""
        with open_binary(path) as file, reading(path):
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise damaged(f"{path} has more than the {max_bytes} bytes that an index may have")
        return cls.parse(path, data)

    def parts(self, name: str) -> list[Self]:
        """Return the objects of a list that says what the dataset consists of; UserError if it is empty."""
        found = self.tables(name)
        if not found:
            hint = f"ls {quoted(self.path.parent)}; an index is written when the writer is closed, or by a merge"
            raise UserError(f"{self.path} names no {name}: the dataset is empty", hint=hint)
        return found

    def file(self, name: str) -> Path:
        """Return a file beside the index or in a folder there; a name that leads elsewhere is refused."""
        text = self.text(name)
        path = PurePosixPath(text)
        if path.is_absolute() or ".." in path.parts or not path.name or "\0" in text:
            raise self.fault(f"{self.place}{name} {text[:80]!r} is not a file of this folder")
        return self.path.parent / path
