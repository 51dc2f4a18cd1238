"""Datasets of Hugging Face's `datasets` as inputs: the Arrow files of this machine that hold what they show.

The package itself is not needed here. A dataset says which files its table was mapped of; whether these hold its rows
is checked: all of them, once, in this order, and with these texts. What was selected, shuffled, repeated, renamed,
transformed or made in memory has to be saved first, as file and row of each document are kept.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from threefold.errors import UserError
from threefold.packages import needed_for

SAVE = "dataset.save_to_disk(FOLDER), and preprocess datasets.load_from_disk(FOLDER)"


class ArrowDataset(Protocol):
    """What is used of `datasets.Dataset`."""

    @property
    def cache_files(self) -> list[dict[str, Any]]:
        """The files of its table."""

    @property
    def data(self) -> Any:
        """Its table, whose `table` is pyarrow's."""

    @property
    def num_rows(self) -> int:
        """Its rows."""


Input = str | os.PathLike[str] | ArrowDataset


def paths_of(inputs: Iterable[Input], text_key: str) -> list[str]:
    """Return inputs as texts: a dataset as its files; UserError for one whose files are not its rows and texts."""
    return [path for source in inputs for path in _paths(source, text_key.split(","))]


def _paths(source: Any, keys: Sequence[str]) -> Iterator[str]:
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
    files = [str(entry["filename"]) for entry in source.cache_files]
    if (getattr(source, "format", None) or {}).get("type") == "custom":
        raise UserError(
            f"a {kind} of {source.num_rows} rows shows what a transform makes, which its files do not hold",
            hint=f"dataset.reset_format() to read its files, or dataset.map(FUNCTION, batched=True) and {SAVE}",
        )
    if fault := _hidden(source, keys):
        raise UserError(f"a {kind} of {source.num_rows} rows {fault}", hint="dataset.reset_format()")
    if fault := _fault(source, files, keys):
        raise UserError(f"a {kind} of {source.num_rows} rows {fault}", hint=SAVE)
    yield from files


def _hidden(source: Any, keys: Sequence[str]) -> str | None:
    """Return which column that a key leads to is hidden by a format, None if none is."""
    shown = getattr(source, "format", None) or {"columns": keys, "output_all_columns": True}
    names = [key if key in source.data.column_names else key.partition(".")[0] for key in keys]
    hidden = [name for name in names if name in source.data.column_names and name not in shown["columns"]]
    return f"does not show its column {hidden[0]!r}" if hidden and not shown["output_all_columns"] else None


def _fault(source: Any, files: list[str], keys: Sequence[str]) -> str | None:
    """Return why the files of a dataset do not hold what it shows, None if they do."""
    if not files:
        return "is in memory"
    if len(set(map(os.path.realpath, files))) < len(files):
        return "reads files more than once, or in parts, and each file is read once"
    is_selected = getattr(source, "_indices", None) is not None
    if is_selected or sum(batch.num_rows for batch in _batches_of(files)) != source.num_rows:
        return "was selected or shuffled, so its files hold other rows"
    if files != sorted(files):
        return f"reads {files[0]} before others, and files are read in the order of their names"
    if _mapped_files(source.data) == files:
        return None
    different = _different_column(getattr(source.data, "table", source.data), files, keys)
    return different and f"shows other texts as {different!r} than its files hold there"


def _mapped_files(table: Any) -> list[str] | None:
    """Return the files that a table of `datasets` is, row after row, without a change; None if it may be another."""
    blocks = getattr(table, "blocks", None)
    if blocks is not None:
        leaves = [leaf for block in blocks for leaf in block] if all(len(block) == 1 for block in blocks) else [None]
        paths = [_mapped_files(leaf) for leaf in leaves]
        return None if None in paths else [path for found in paths for path in found or []]
    changes = {change[0] for change in getattr(table, "replays", None) or []}
    path = getattr(table, "path", None)
    return [str(path)] if path is not None and changes <= {"replace_schema_metadata"} else None


def _different_column(table: Any, files: Sequence[str], keys: Sequence[str]) -> str | None:
    """Return a column that a key may lead to, and that a table does not have as its files do; None if there is none.

    A key `meta.text` leads to a column of that name, or into the column `meta`. Values are compared, not read ahead.
    """
    first = 0
    names = dict.fromkeys(name for key in keys for name in (key, key.partition(".")[0]))
    for batch in _batches_of(files):
        for name in names:
            shown = table.column(name).slice(first, batch.num_rows) if name in table.column_names else None
            stored = batch.column(name) if name in batch.schema.names else None
            if (shown is None) != (stored is None) or (shown is not None and not _is_equal(shown, stored)):
                return name
        first += batch.num_rows
    return None


def _is_equal(shown: Any, stored: Any) -> bool:
    """Return whether a part of a table's column has the values of one of a file; kinds of strings may differ."""
    from pyarrow import ArrowException, chunked_array

    try:
        return bool(shown.equals(chunked_array([stored if stored.type == shown.type else stored.cast(shown.type)])))
    except ArrowException:  # there is no such cast
        return False


def _batches_of(files: Sequence[str]) -> Iterator[Any]:
    with needed_for("Arrow files"):
        from pyarrow import ipc, memory_map
    for path in files:
        with memory_map(path) as source, ipc.open_stream(source) as stream:
            yield from stream
