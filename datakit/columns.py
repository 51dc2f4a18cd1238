"""Columns: the text columns of a parquet or Arrow IPC file, row by row; memory is some pages of each and 64 rows.

A slice holds the row groups (in Arrow files: the record batches) that begin in its bytes, so that a file is cut without
being opened. An uncompressed record batch is not copied but mapped, so it may be as large as the file.
"""

import os
from collections.abc import Iterator, Sequence
from typing import Any

from datakit.inputs import FileSlice
from threefold.errors import StorageError, UserError

_BATCH_ROWS = 64
_BUFFER_BYTES = 1 << 20
_TEXT_TYPES = {"string", "large_string", "string_view", "binary", "large_binary", "binary_view"}
_ARROW_FILE_MAGIC = b"ARROW1"


def read_columns(part: FileSlice, names: Sequence[str]) -> Iterator[list[bytes]]:
    """The UTF-8 texts of each row of a slice, in the order of the names, nulls and columns that are not there left out.

    UserError for a damaged file, for a column that is no text, and where none of the columns is there.
    """
    for columns in _columns(part, names):
        for row in zip(*columns, strict=True):
            yield [value for value in row if value is not None]


def rows_before(part: FileSlice, names: Sequence[str]) -> int:
    """The number of rows of the file that come before a slice."""
    before = FileSlice(part.file, 0, part.start)
    return sum(len(columns[0]) for columns in _columns(before, names)) if part.start else 0


def _columns(part: FileSlice, names: Sequence[str]) -> Iterator[list[list[bytes | None]]]:
    """The columns of 64 rows after 64 rows; what pyarrow raises is told in our words."""
    import pyarrow

    path = part.file.path
    try:
        for batch in (_parquet_batches if part.file.kind == "parquet" else _arrow_batches)(part, names):
            columns = [batch.column(name).cast(pyarrow.large_binary()) for name in names if name in batch.schema.names]
            for column in columns:
                column.validate(full=True)
            yield [column.to_pylist() for column in columns]
    except (pyarrow.ArrowException, EOFError, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise StorageError(f"cannot read {path}: {os.strerror(error.errno)}", hint=f"ls -l {path}") from error
        why = " ".join(str(error).split())[:200]
        raise UserError(
            f"{path} is truncated or damaged, or no {part.file.kind}: {why}", hint="copy or download it again"
        ) from None


def _parquet_batches(part: FileSlice, names: Sequence[str]) -> Iterator[Any]:
    """The row groups whose first byte lies in the slice, had the file nothing but their compressed columns."""
    from pyarrow.parquet import ParquetFile

    with ParquetFile(
        part.file.path, pre_buffer=False, buffer_size=_BUFFER_BYTES, page_checksum_verification=True
    ) as file:
        columns = _found_columns(part, names, file.schema_arrow)
        begin, groups = 0, []
        for number in range(file.num_row_groups):
            group = file.metadata.row_group(number)
            if part.start <= begin < part.stop:
                groups.append(number)
            begin += sum(group.column(column).total_compressed_size for column in range(group.num_columns))
        if groups:
            yield from file.iter_batches(_BATCH_ROWS, row_groups=groups, columns=columns, use_threads=False)


def _arrow_batches(part: FileSlice, names: Sequence[str]) -> Iterator[Any]:
    """The record batches that begin in the slice; those of a file with an index count as equally large."""
    from pyarrow import ipc, memory_map

    with memory_map(part.file.path) as source:
        has_index = source.read(len(_ARROW_FILE_MAGIC)) == _ARROW_FILE_MAGIC
        source.seek(0)
        schema = (ipc.open_file if has_index else ipc.open_stream)(source).schema
        numbers = [schema.names.index(name) for name in _found_columns(part, names, schema)]
        options = ipc.IpcReadOptions(included_fields=numbers, use_threads=False)
        source.seek(0)
        if has_index:
            file = ipc.open_file(source, options=options)
            for number in range(file.num_record_batches):
                if part.start <= source.size() * number // file.num_record_batches < part.stop:
                    yield from _pieces(file.get_batch(number))
            return
        stream = ipc.open_stream(source, options=options)
        while (begin := source.tell()) < part.stop:
            try:
                batch = stream.read_next_batch()
            except StopIteration:
                return
            if begin >= part.start:
                yield from _pieces(batch)
        if begin == source.size():
            raise EOFError("its stream ends without an end mark")


def _pieces(batch: Any) -> Iterator[Any]:
    for row in range(0, batch.num_rows, _BATCH_ROWS):
        yield batch.slice(row, _BATCH_ROWS)


def _found_columns(part: FileSlice, names: Sequence[str], schema: Any) -> list[str]:
    """Those of the columns that are there, all of text; UserError with the columns that there are, or with the type."""
    texts = [field.name for field in schema if _is_text(field.type)]
    found = [name for name in names if name in schema.names]
    hint = f"--text-key {texts[0]}" if texts else "convert a column of text into one of type string"
    if not found:
        asked, others = " or ".join(map(repr, names)), ", ".join(map(repr, schema.names)) or "none"
        raise UserError(f"{part.file.path}: no column {asked}; its columns: {others}", hint=hint)
    for name in found:
        if name not in texts:
            kind = schema.field(name).type
            raise UserError(f"{part.file.path}: the column {name!r} is no text but {kind}", hint=hint)
    return found


def _is_text(kind: Any) -> bool:
    """Whether a type is text or bytes, also where each distinct text is stored once."""
    from pyarrow import types

    return str(kind.value_type if types.is_dictionary(kind) else kind) in _TEXT_TYPES
