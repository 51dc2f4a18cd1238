"""Datasets of Hugging Face's `datasets` as inputs: the Arrow files of this machine that hold their rows.

The package itself is not needed here. A dataset says which files its table was mapped of; whether these hold its rows,
all of them and in this order, is checked: what was selected, shuffled or made in memory has to be saved first.
"""

import os
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from threefold.errors import UserError
from threefold.packages import needed_for


class ArrowDataset(Protocol):
    """What is used of `datasets.Dataset`."""

    @property
    def cache_files(self) -> list[dict[str, Any]]:
        """The files of its table."""

    @property
    def num_rows(self) -> int:
        """Its rows."""


Input = str | os.PathLike[str] | ArrowDataset


def paths_of(inputs: Iterable[Input]) -> list[str]:
    """Return inputs as texts: a dataset as its files; UserError for one whose files are not its rows."""
    return [path for each in inputs for path in _paths(each)]


def _paths(source: Any) -> Iterator[str]:
    if isinstance(source, str | os.PathLike):
        yield os.fspath(source)
        return
    kind = f"{type(source).__module__.partition('.')[0]}.{type(source).__name__}"
    if not hasattr(source, "cache_files") or not hasattr(source, "num_rows") or isinstance(source, dict):
        parts = f": name one of {', '.join(map(str, source))}" if isinstance(source, dict) else ""
        raise UserError(
            f"an input is a {kind}, which is not a path, a URL or a dataset with a table of its own{parts}",
            hint="load_dataset(NAME, split='train'), without streaming",
        )
    files = [str(each["filename"]) for each in source.cache_files]
    num_rows = None if getattr(source, "_indices", None) is not None else _rows_in(files)
    if num_rows != source.num_rows or not files:
        what = "is in memory" if not files else "was selected or shuffled, so its files hold other rows"
        raise UserError(
            f"a {kind} of {source.num_rows} rows {what}",
            hint="dataset.save_to_disk(FOLDER), and preprocess datasets.load_from_disk(FOLDER)",
        )
    yield from files


def _rows_in(files: list[str]) -> int:
    with needed_for("Arrow files"):
        from pyarrow import ipc, memory_map
    found = 0
    for path in files:
        with memory_map(path) as source, ipc.open_stream(source) as stream:
            found += sum(batch.num_rows for batch in stream)
    return found
