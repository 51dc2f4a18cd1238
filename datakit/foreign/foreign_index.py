"""ForeignIndex: the index.json of an MDS or litdata dataset, read field by field; a fault names the file and field.

And which column (of MDS) or leaf (of litdata) of a dataset's samples holds tokens, its bytes and dtype.
"""

import os
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from datakit.files.durable import reading
from datakit.foreign.exact_reader import AGAIN, ExactReader, damaged, open_binary
from datakit.foreign.foreign_store import Choices
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
        tables = self.tables(name)
        if not tables:
            raise UserError(
                f"{self.path} names no {name}: the dataset is empty",
                hint=f"ls {quoted(self.path.parent)}; an index is written when the writer is closed, or by a merge",
            )
        return tables

    def file(self, name: str) -> Path:
        """Return a file beside the index or in a folder there; a name that leads elsewhere is refused."""
        text = self.text(name)
        path = PurePosixPath(text)
        if path.is_absolute() or ".." in path.parts or not path.name or "\0" in text:
            raise self.fault(f"{self.place}{name} {text[:80]!r} is not a file of this folder")
        return self.path.parent / path


def choose_column(
    place: str,
    noun: str,
    columns: Sequence[tuple[str, str]],
    may_hold_tokens: Callable[[str], bool],
    choices: Choices,
    *,
    kinds: str,
    how: str,
) -> int:
    """Return the number of the column that `choices` names, else of the only one that may hold tokens by its encoding.

    `columns` are names and encodings, `kinds` the encodings that will do, `how` the hint where none does. UserError
    says at which `place` there is no such column, and what there is.
    """
    names = [name for name, _ in columns]
    shown = ", ".join(f"{name} ({encoding})" for name, encoding in columns) or "none"
    fitting = [number for number, (_, encoding) in enumerate(columns) if may_hold_tokens(encoding)]
    if choices.column is not None:
        if choices.column not in names:
            raise UserError(f"{place} has no {noun} {choices.column!r}, it has {shown}", hint="choose another --column")
        number = names.index(choices.column)
        if number not in fitting:
            encoding = columns[number][1]
            why = "pickle is never loaded" if _is_pickled(encoding) else f"tokens are {kinds}"
            raise UserError(f"{place}: {noun} {choices.column!r} is {encoding}; {why}", hint=how)
        return number
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise UserError(
            f"{place} has more than one {noun} that may hold tokens: {shown}", hint=f"--column {names[fitting[0]]}"
        )
    why = "; pickle is never loaded" if any(_is_pickled(encoding) for _, encoding in columns) else ""
    raise UserError(f"{place} has no {noun} that may hold tokens: {shown}{why}", hint=how)


def read_column(
    reader: ExactReader, size_bytes: int, sizes: Sequence[int | None], number: int, sample: str, noun: str
) -> tuple[int, bytes]:
    """Return where a column of a sample begins, and its bytes; `reader` passes from the sample's begin to its end.

    `sizes` are those of all columns in bytes, None for each whose size is a u32 at the sample's begin.
    """
    stop, num_sizes = reader.at + size_bytes, sizes.count(None)
    if 4 * num_sizes > size_bytes:
        raise damaged(f"{sample} has {size_bytes} bytes, too few for the sizes of its {noun}")
    variable = iter(reader.offsets(num_sizes).tolist())
    known: list[int] = [next(variable) if size is None else size for size in sizes]
    if sum(known) != stop - reader.at:
        raise damaged(f"{sample} has {noun} of {known} bytes in {size_bytes}")
    reader.skip(sum(known[:number]))
    at, data = reader.at, reader.read(known[number])
    reader.skip(stop - reader.at)
    return at, data


def tokens_in(
    data: bytes, head: int, dtype: str, shape: tuple[int, ...] | None, sample: str, how: str, place: str = ""
) -> npt.NDArray[Any]:
    """Return the tokens in a column's bytes from `head` on, as an array of one dimension.

    CheckFailed if they are not of that dtype and shape, UserError with the hint `how` if they have more dimensions.
    """
    little_endian = np.dtype(dtype).newbyteorder("<")
    count, rest = divmod(len(data) - head, little_endian.itemsize)
    if rest or count < 0 or (shape is not None and prod(shape) != count):
        of_shape = "" if shape is None else f" of shape {shape}"
        raise damaged(f"{sample} has {len(data) - head} bytes of {dtype}{of_shape}{place}")
    if shape is not None and count and max(shape, default=1) != count:
        raise UserError(f"{sample} has tokens of shape {shape}, one is wanted", hint=how)
    return np.frombuffer(data, little_endian, count, head)


def require_dtype(what: str, dtype: str, choices: Choices, *, is_raw: bool) -> None:
    """Raise UserError if raw bytes lack a dtype in `choices`, or where it is not the `dtype` of the column."""
    if is_raw and choices.dtype is None:
        raise UserError(
            f"{what} is raw bytes, which do not say the tokens' dtype",
            hint="--dtype int64, or what the writer called tobytes() on",
        )
    if not is_raw and choices.dtype not in (None, dtype):
        raise UserError(f"{what} is {dtype}, not {choices.dtype}", hint="leave out --dtype")


def _is_pickled(encoding: str) -> bool:
    return encoding == "pkl" or "pickle" in encoding
