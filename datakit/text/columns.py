"""Columns: the text columns of a parquet or Arrow IPC file, row by row; memory is some pages of each and 64 rows.

A slice holds the row groups (in Arrow files: the record batches) that begin in its bytes, so that a file is cut without
being opened. Arrow files are mapped: a record batch may be as large as the file, and is held whole where compressed.
"""

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from datakit.files.remote_file import is_url
from datakit.text.inputs import FileSlice
from threefold.errors import StorageError, UserError

_BATCH_ROWS = 64
_BUFFER_BYTES, _REMOTE_BUFFER_BYTES = 1 << 20, 8 << 20
_NOT_TEXT = True  # in place of a value of another type
Path = tuple[str, ...]  # the name of a column, and of the fields in it that lead to a text
FindColumns = Callable[[Any], list[Path]]  # in a schema
_TEXT_TYPES = {"string", "large_string", "string_view", "binary", "large_binary", "binary_view"}
_MAPPED_BYTES = 32 << 20
_ARROW_FILE_MAGIC = b"ARROW1"


def read_columns(part: FileSlice, names: Sequence[str], *, is_lenient: bool = False) -> Iterator[list[bytes]]:
    """Yield the UTF-8 texts of each row of a slice, in the order of the names, without nulls and missing columns.

    UserError for a damaged file, for a column that is not text, and if none of the columns is there. If `is_lenient`,
    the last two are rows without texts.
    """
    for columns in _columns(part, names, is_lenient):
        for row in zip(*columns, strict=True):
            yield [] if _NOT_TEXT in row else [value for value in row if value is not None]


def rows_before(part: FileSlice, names: Sequence[str]) -> int:
    """Return the number of rows of the file that come before a slice."""
    before = FileSlice(part.file, 0, part.start)
    return sum(len(columns[0]) for columns in _columns(before, names, False)) if part.start else 0


def _columns(part: FileSlice, names: Sequence[str], is_lenient: bool) -> Iterator[list[list[bytes | None]]]:
    """Yield the columns of 64 rows after 64 rows; what pyarrow raises is put into our words."""
    from pyarrow import ArrowException

    path = part.file.path
    try:
        find = partial(_found_columns, part, names, is_lenient)
        for columns in (_parquet_columns if part.file.kind == "parquet" else _arrow_columns)(part, find):
            yield [column.to_pylist() for column in columns]
    except (ArrowException, EOFError, OSError, UnicodeDecodeError) as error:  # the last from a damaged column's name
        if isinstance(error, OSError) and error.errno:
            raise StorageError(
                f"cannot read {path}: {os.strerror(error.errno)}", hint=part.file.hint("ls -l")
            ) from error
        why = " ".join(str(error).split())[:200]
        raise UserError(
            f"{path} is truncated or damaged, or no {part.file.kind}: {why}", hint="copy or download it again"
        ) from None


def _parquet_columns(part: FileSlice, find: FindColumns) -> Iterator[list[Any]]:
    """Yield the row groups that begin in the slice, if all rows of the file were equally large."""
    from pyarrow.parquet import ParquetFile

    remote = is_url(part.file.path)
    with (
        nullcontext(part.file.spooled or part.file.path) if not remote else part.file.open() as source,
        ParquetFile(
            source,
            pre_buffer=False,
            buffer_size=_REMOTE_BUFFER_BYTES if remote else _BUFFER_BYTES,
            page_checksum_verification=True,
        ) as file,
    ):
        paths = find(file.schema_arrow)
        columns = sorted({".".join(path) for path in paths if path})
        num_rows, row, groups = max(file.metadata.num_rows, 1), 0, []
        for number in range(file.num_row_groups):
            if part.start <= part.file.size_bytes * row // num_rows < part.stop:
                groups.append(number)
            row += file.metadata.row_group(number).num_rows
        if row != file.metadata.num_rows:
            raise EOFError(f"its row groups have {row} rows, its footer says {file.metadata.num_rows}")
        for number in groups:
            for batch in _row_group(file, number, columns):
                yield [_as_bytes(_column(batch, path)) for path in paths]


def _row_group(file: Any, number: int, columns: Sequence[str]) -> Iterator[Any]:
    """Yield a row group in batches; what is wrong with it is said with its number."""
    from pyarrow import ArrowException

    try:
        yield from file.iter_batches(_BATCH_ROWS, row_groups=[number], columns=columns, use_threads=False)
    except (ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        raise EOFError(f"row group {number} of {file.num_row_groups}: {error}") from None


def _arrow_columns(part: FileSlice, find: FindColumns) -> Iterator[list[Any]]:
    """Yield the record batches of the slice in pieces of 64 rows."""
    import pyarrow

    mapped: mmap.mmap | None = None
    with part.file.open() as file:
        if is_url(part.file.path):
            source = pyarrow.PythonFile(file, mode="r")
        elif not os.fstat(file.fileno()).st_size:
            raise EOFError("it has 0 bytes")
        else:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            source = pyarrow.BufferReader(pyarrow.py_buffer(mapped))
        yield from _pieces(_record_batches(part, find, source), mapped)


def _pieces(batches: Iterator[tuple[list[Path], Any]], mapped: mmap.mmap | None) -> Iterator[list[Any]]:
    """Yield columns of 64 rows; of a mapped file, the pages that were read are let go of."""
    num_bytes = 0
    for paths, batch in batches:
        columns = [_as_bytes(_column(batch, path)) for path in paths]
        for row in range(0, batch.num_rows, _BATCH_ROWS):
            pieces = [column.slice(row, _BATCH_ROWS) for column in columns]
            yield pieces
            num_bytes += sum(piece.nbytes for piece in pieces)
            if mapped and num_bytes > _MAPPED_BYTES:
                mapped.madvise(mmap.MADV_DONTNEED)
                num_bytes = 0


def _record_batches(part: FileSlice, find: FindColumns, source: Any) -> Iterator[tuple[list[Path], Any]]:
    """Yield the record batches that begin in the slice, with the paths in them; those of a file with an index count as
    equally large.
    """
    from pyarrow import ipc

    if source.read(len(_ARROW_FILE_MAGIC)) == _ARROW_FILE_MAGIC:
        file = ipc.open_file(source)
        paths = find(file.schema)
        for number in range(file.num_record_batches):
            if part.start <= part.file.size_bytes * number // file.num_record_batches < part.stop:
                yield paths, file.get_batch(number)
        return
    source.seek(0)
    schema = ipc.open_stream(source).schema
    paths = find(schema)
    numbers = sorted({schema.names.index(path[0]) for path in paths if path})
    source.seek(0)
    stream = ipc.open_stream(source, options=ipc.IpcReadOptions(included_fields=numbers, use_threads=False))
    while (begin := source.tell()) < part.stop:
        try:
            batch = stream.read_next_batch()
        except StopIteration:
            return
        if begin >= part.start:
            yield paths, batch
    if begin == source.size():
        raise EOFError("its stream ends without an end mark")


def _column(batch: Any, path: Path) -> Any:
    """Return the column of a batch that a path leads to; null where what holds it is null, or for an empty path."""
    import pyarrow

    if not path:
        return pyarrow.nulls(batch.num_rows)
    column = batch.column(path[0])
    for name in path[1:]:
        column = column.flatten()[column.type.get_field_index(name)]
    return column


def _as_bytes(column: Any) -> Any:
    """Return a column as bytes, its offsets checked (damage would be a crash), its UTF-8 not.

    That is a matter of a row. In a column of another type each value is _NOT_TEXT.
    """
    import pyarrow

    if not _is_text(column.type):
        column.validate(full=True)
        return pyarrow.array(
            [None if is_null else _NOT_TEXT for is_null in column.is_null().to_pylist()], pyarrow.bool_()
        )
    if pyarrow.types.is_dictionary(column.type):
        return pyarrow.DictionaryArray.from_arrays(column.indices, _as_bytes(column.dictionary))
    if "string" in str(column.type):
        column = column.view(getattr(pyarrow, str(column.type).replace("string", "binary"))())
    column.validate(full=True)
    return column


def _found_columns(part: FileSlice, names: Sequence[str], is_lenient: bool, schema: Any) -> list[Path]:
    """Those of the columns that are there, all of text; UserError with the columns that there are, or with the type.

    A name may lead into columns of structs, as `meta.text` does; a column that is there as it is spelled wins. If
    `is_lenient`, columns of any type are found, and an empty path if none is there.
    """
    from pyarrow import types

    fields = {field.name: field.type for field in schema}
    texts = [".".join(path) for path in _text_paths(fields)]
    paths = [path for name in names if (path := _find_path(fields, name))]
    if is_lenient:
        return paths or [()]
    hint = f"--text-key {texts[0]}" if texts else "convert a column of text into one of type string"
    if not paths:
        asked, others = " or ".join(map(repr, names)), ", ".join(map(repr, schema.names)) or "none"
        raise UserError(f"{part.file.path}: no column {asked}; its columns: {others}", hint=hint)
    for path in paths:
        if not (_is_text(kind := _type_of(fields, path)) or types.is_null(kind)):
            raise UserError(f"{part.file.path}: the column {'.'.join(path)!r} is not text but {kind}", hint=hint)
    return paths


def _find_path(fields: dict[str, Any], name: str) -> Path | None:
    if name in fields:
        return (name,)
    at = name.find(".")
    while at >= 0:
        head, rest = name[:at], name[at + 1 :]
        if head in fields and (inner := _find_path(_fields_of(fields[head]), rest)):
            return (head, *inner)
        at = name.find(".", at + 1)
    return None


def _type_of(fields: dict[str, Any], path: Path) -> Any:
    for name in path[:-1]:
        fields = _fields_of(fields[name])
    return fields[path[-1]]


def _text_paths(fields: dict[str, Any]) -> Iterator[Path]:
    """Yield the paths to all texts, those right in the table first."""
    yield from ((name,) for name, kind in fields.items() if _is_text(kind))
    for name, kind in fields.items():
        yield from ((name, *path) for path in _text_paths(_fields_of(kind)))


def _fields_of(kind: Any) -> dict[str, Any]:
    """Return the fields of a struct by name, none of another type."""
    from pyarrow import types

    return {field.name: field.type for field in kind} if types.is_struct(kind) else {}


def _is_text(kind: Any) -> bool:
    """Return whether a type is text or bytes, also where each distinct text is stored once."""
    from pyarrow import types

    return str(kind.value_type if types.is_dictionary(kind) else kind) in _TEXT_TYPES
