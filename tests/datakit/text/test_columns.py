"""Columns: every row of parquet and Arrow files once, in any cut; damage and other columns are told in one error."""

import json
import os
import re
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import ipc, parquet

from datakit import Recipe, TokenStore, preprocess
from datakit.text.columns import read_columns
from datakit.text.documents import DocumentReader, DocumentRules
from datakit.text.inputs import FileSlice, cut, find_inputs
from tests.datakit.conftest import Cli, files_of, write_jsonl
from threefold.errors import StorageError, UserError

FORMS = ["parquet", "file.arrow", "stream.arrow", "zstd.arrow"]


def write_table(path: Path, columns: dict[str, Any], group_rows: int = 1000) -> Path:
    """Write columns in the format that a name asks for, `group_rows` a row group or record batch."""
    table = pa.table(columns)
    if path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=group_rows, write_page_checksum=True)
        return path
    make = ipc.new_stream if path.name.startswith("stream") else ipc.new_file
    options = ipc.IpcWriteOptions(compression="zstd" if path.name.startswith("zstd") else None)
    with pa.OSFile(str(path), "wb") as sink, make(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=group_rows)
    return path


def whole(path: Path) -> FileSlice:
    [file] = find_inputs([str(path)])
    return FileSlice(file, 0, file.size_bytes)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=25)
@given(
    texts=st.lists(st.none() | st.text(st.characters(exclude_categories=["Cs"])), max_size=200),
    group_rows=st.integers(1, 150),
    item_bytes=st.integers(50, 3000),
)
def test_any_cut_gives_every_row_once_in_order(
    tmp_path_factory: pytest.TempPathFactory, form: str, texts: list[str | None], group_rows: int, item_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("columns") / form
    path = path.with_name("a.parquet") if form == "parquet" else path
    write_table(path, {"id": range(len(texts)), "text": pa.array(texts, pa.string())}, group_rows)
    items = list(cut(find_inputs([str(path)]), item_bytes, split_txt=False))
    assert len(items) == -(-path.stat().st_size // item_bytes)
    found = [values for item in items for values in read_columns(item.slices[0], ["text"])]
    assert found == [[] if text is None else [text.encode()] for text in texts]
    reader = DocumentReader(whole(path), DocumentRules(skip_invalid=True))
    documents = list(reader)
    assert [document.text for document in documents] == [text for text in texts if text is not None]
    assert [document.line for document in documents] == [row for row, text in enumerate(texts) if text is not None]
    assert (reader.skipped["invalid"], reader.num_lines) == (texts.count(None), len(texts))


@pytest.mark.parametrize("form", ["a.parquet", "file.arrow"])
@pytest.mark.parametrize(
    "kind",
    [pa.large_string(), pa.binary(), pa.large_binary(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())],
    ids=str,
)
def test_every_type_of_text_is_read(tmp_path: Path, form: str, kind: pa.DataType) -> None:
    values = pa.array(["eins", None, "列車"]).cast(kind)
    path = write_table(tmp_path / form, {"text": values})
    assert list(read_columns(whole(path), ["text"])) == [[b"eins"], [], ["列車".encode()]]


@pytest.fixture(params=FORMS)
def table(request: pytest.FixtureRequest, tmp_path: Path, texts: list[str]) -> Path:
    """The corpus as a table of 40 rows a group."""
    name = "a.parquet" if request.param == "parquet" else request.param
    return write_table(tmp_path / name, {"id": range(len(texts)), "body": texts}, 40)


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("table", FORMS, indirect=True)
def test_a_store_of_columns_has_the_tokens_of_jsonl_whatever_the_workers(
    tmp_path: Path, table: Path, texts: list[str], tokenizer_path: str
) -> None:
    recipe = Recipe(tokenizer_path, append_eod=True, text_key="body", split=(0.8, 0.2))
    item_bytes = table.stat().st_size // 6
    for workers in (1, 3):
        preprocess([str(table)], tmp_path / str(workers), recipe, num_workers=workers, item_bytes=item_bytes)
    one = files_of(tmp_path / "1")
    assert len(one) > 20
    assert files_of(tmp_path / "3") == one
    preprocess([str(write_jsonl(tmp_path / "a.jsonl", texts, "body"))], tmp_path / "s", recipe)
    for part in ("train", "valid"):
        store, same = TokenStore.open(tmp_path / "1" / part), TokenStore.open(tmp_path / "s" / part)
        assert (store.tokens(0, store.num_tokens) == same.tokens(0, same.num_tokens)).all()
        for document in range(store.num_documents):
            assert store.origin(document).line == same.origin(document).line  # the row, from 1, is jsonl's line
            assert (store.origin(document).path, store.origin(document).offset_bytes) == (str(table), 0)


@pytest.mark.parametrize(
    "table",
    FORMS,
    indirect=True,
)
@pytest.mark.ci
@pytest.mark.slow
def test_a_run_over_columns_that_was_killed_continues_to_the_same_bytes(
    tmp_path: Path, table: Path, tokenizer_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, num_messages = Recipe(tokenizer_path, text_key="body"), 0
    item_bytes = table.stat().st_size // 6

    def stop(*_: object) -> None:
        nonlocal num_messages
        num_messages += 1
        if num_messages == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("datakit.preprocessing.meter.Meter.update", stop)
        with pytest.raises(KeyboardInterrupt):
            preprocess([str(table)], tmp_path / "killed", recipe, num_workers=2, item_bytes=item_bytes)
    summary = preprocess([str(table)], tmp_path / "killed", recipe, num_workers=2, item_bytes=item_bytes)
    assert summary.num_items_done_before > 0
    preprocess([str(table)], tmp_path / "whole", recipe, item_bytes=item_bytes)
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "whole")


@pytest.mark.parametrize("kept_share", [0.0, 0.02, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused(table: Path, kept_share: float) -> None:
    size_bytes = int(table.stat().st_size * kept_share)
    os.truncate(table, size_bytes)
    with pytest.raises(UserError, match=f"{re.escape(str(table))} is truncated or damaged") as caught:
        list(read_columns(whole(table), ["body"]))
    assert caught.value.hint


@pytest.mark.parametrize("compression", ["none", "snappy"])
def test_a_row_group_that_is_lost_is_named(tmp_path: Path, compression: str) -> None:
    """As zeros, which a file system leaves of what did not get to the disk."""
    path = tmp_path / "a.parquet"
    table = pa.table({"text": [f"{number} of the texts" for number in range(300)]})
    parquet.write_table(table, path, row_group_size=100, compression=compression)
    column = parquet.ParquetFile(path).metadata.row_group(1).column(0)
    content = bytearray(path.read_bytes())
    begin = column.dictionary_page_offset or column.data_page_offset
    content[begin : begin + column.total_compressed_size] = bytes(column.total_compressed_size)
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"a\.parquet is truncated or damaged, or no parquet: row group 1 of 3: "):
        list(read_columns(whole(path), ["text"]))


def test_a_stream_that_was_cut_between_two_batches_is_refused(tmp_path: Path) -> None:
    path = write_table(tmp_path / "stream.arrow", {"text": ["one", "two"]}, 1)
    os.truncate(path, path.stat().st_size - 8)  # without its end mark
    with pytest.raises(UserError, match="ends without an end mark"):
        list(read_columns(whole(path), ["text"]))


def test_a_flipped_bit_of_a_checked_page_is_refused(tmp_path: Path) -> None:
    path = write_table(tmp_path / "a.parquet", {"text": ["x" * 3000]})
    content = bytearray(path.read_bytes())
    content[content.index(b"PAR1") + 60] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"a\.parquet is truncated or damaged"):
        list(read_columns(whole(path), ["text"]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [pa.string(), pa.dictionary(pa.int32(), pa.string())], ids=["string", "dictionary"])
def test_a_changed_byte_is_refused_or_read_but_never_a_crash(tmp_path: Path, form: str, kind: pa.DataType) -> None:
    texts = pa.array([f"w{i % 7}" for i in range(20)]).cast(kind)
    path = write_table(tmp_path / ("a.parquet" if form == "parquet" else form), {"text": texts}, 5)
    content, random = path.read_bytes(), Random(1)
    for _ in range(300):
        changed = bytearray(content)
        changed[random.randrange(len(changed))] = random.randrange(256)
        path.write_bytes(changed)
        with suppress(UserError):
            list(DocumentReader(whole(path), DocumentRules()))


def test_what_is_no_table_or_gone_is_told(tmp_path: Path) -> None:
    for name in ("a.parquet", "a.arrow"):
        part = whole(write_jsonl(tmp_path / name, ["x"] * 9))
        with pytest.raises(UserError, match=f"{name} is truncated or damaged, or no {name[2:]}"):
            list(read_columns(part, ["text"]))
        os.unlink(tmp_path / name)
        with pytest.raises(StorageError, match=f"cannot read .*{name}: No such file"):
            list(read_columns(part, ["text"]))


def test_another_column_or_type_is_told_with_the_columns(table: Path) -> None:
    with pytest.raises(UserError, match="no column 'text'; its columns: 'id', 'body'") as caught:
        list(read_columns(whole(table), ["text"]))
    assert caught.value.hint == "--text-key body"
    with pytest.raises(UserError, match="the column 'id' is not text but int64") as caught:
        list(read_columns(whole(table), ["id"]))
    assert caught.value.hint == "--text-key body"


@pytest.mark.parametrize("form", ["a.parquet", "file.arrow"])
def test_the_texts_of_several_columns_are_joined_by_blank_lines(tmp_path: Path, form: str) -> None:
    titles = pa.array(["T", "U", None, "V"]).cast("binary")
    part = whole(write_table(tmp_path / form, {"text": ["x", None, None, ""], "id": [1, 2, 3, 4], "title": titles}))
    rules = DocumentRules("title,none,text", skip_invalid=True)
    assert [document.text for document in DocumentReader(part, rules)] == ["T\n\nx", "U", "V"]
    with pytest.raises(UserError, match="row 3: no column 'title' or 'none' or 'text' with a text\n"):
        list(DocumentReader(part, replace(rules, skip_invalid=False)))
    with pytest.raises(UserError, match="no column 'none' or 'no'; its columns: 'text', 'id', 'title'"):
        list(DocumentReader(part, DocumentRules("none,no")))


@pytest.mark.parametrize("form", ["a.parquet", "file.arrow", "stream.arrow"])
def test_a_row_that_is_no_utf8_is_named_also_in_a_later_slice(tmp_path: Path, form: str) -> None:
    rows = [os.urandom(900).hex().encode() for _ in range(60)]
    path = write_table(tmp_path / form, {"text": [*rows, b"caf\xe9", *rows]}, 10)
    items = list(cut(find_inputs([str(path)]), path.stat().st_size // 5, split_txt=False))
    with pytest.raises(UserError, match=rf"{form}, row 61: invalid UTF-8: .* 0xe9 at byte 3"):
        [list(DocumentReader(item.slices[0], DocumentRules())) for item in items]
    reader = DocumentReader(whole(path), DocumentRules(skip_invalid=True))
    assert [document.line for document in reader] == [*range(60), *range(61, 121)]
    assert reader.skipped == {"invalid": 1}


ROWS: list[dict[str, Any]] = [
    {"title": "T", "body": "B"}, {"title": None, "body": "B"}, {"title": "T"}, {"body": None}, {"title": ""},
]  # fmt: skip


@pytest.mark.parametrize("key", ["title", "body", "title,body", "body,title,none", "none"])
@pytest.mark.parametrize("form", [*FORMS, "datasets"])
def test_nulls_and_missing_texts_are_those_of_jsonl(tmp_path: Path, form: str, key: str) -> None:
    def read(path: Path, skip_invalid: bool) -> tuple[list[tuple[int, str]], int] | str:
        reader = DocumentReader(whole(path), DocumentRules(key, skip_invalid=skip_invalid))
        try:
            found = [(document.line, document.text) for document in reader]
        except UserError as error:
            place = re.search(r"(?:line|row) (\d+): ", error.message)  # else the file is refused
            return place[1] if place else "1"
        return found, reader.skipped["invalid"]

    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    columns = {name: pa.array([row.get(name) for row in ROWS], pa.string()) for name in ("title", "body")}
    path = tmp_path / {"parquet": "a.parquet", "datasets": "d.arrow"}.get(form, form)
    if form == "datasets":
        datasets = pytest.importorskip("datasets")
        datasets.Dataset.from_list([{"title": None, "body": None} | row for row in ROWS]).save_to_disk(tmp_path / "d")
        [path] = (tmp_path / "d").glob("*.arrow")
    else:
        write_table(path, columns, 2)
    for skip_invalid in (False, True):
        assert read(path, skip_invalid) == read(lines, skip_invalid)


@pytest.mark.parametrize("form", FORMS)
def test_a_column_of_another_type_is_what_such_values_are_in_jsonl(tmp_path: Path, form: str) -> None:
    path = tmp_path / ("a.parquet" if form == "parquet" else form)
    write_table(path, {"n": pa.array([1, None, 3]), "nothing": pa.nulls(3), "text": ["x", "y", None]}, 2)
    for key, texts in [("text,n", ["y"]), ("text,nothing", ["x", "y"]), ("nothing", []), ("n", [])]:
        reader = DocumentReader(whole(path), DocumentRules(key, skip_invalid=True))
        assert [document.text for document in reader] == texts
        assert reader.skipped["invalid"] == 3 - len(texts)
    with pytest.raises(UserError, match="row 1: no text: 'nothing' is null\n") as caught:
        list(DocumentReader(whole(path), DocumentRules("nothing")))
    assert caught.value.hint == "--skip-invalid"
    with pytest.raises(UserError, match="the column 'n' is not text but int64"):
        list(DocumentReader(whole(path), DocumentRules("text,n")))


def test_without_pyarrow_the_command_says_what_to_install(
    tmp_path: Path, tokenizer_path: str, cli: Cli, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_table(tmp_path / "a.parquet", {"text": ["x"]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert cli("preprocess", path, "--output", tmp_path / "s", "--tokenizer", tokenizer_path) == 2
    assert capsys.readouterr().err == (
        f"error: {path}: reading parquet needs the package pyarrow, which is not installed\n"
        'hint: pip install "pyarrow>=15"\n'
    )


@pytest.mark.parametrize("form", ["a.parquet", *FORMS[1:]])
def test_names_lead_into_structs_and_a_literal_point_wins(tmp_path: Path, form: str) -> None:
    def texts_of(key: str) -> list[str]:
        rules = DocumentRules(key, nulls_are_empty=True)
        return [document.text for document in DocumentReader(whole(tmp_path / form), rules)]

    rows = [{"body": "one", "in": {"x": "1"}}, None, {"body": None, "in": None}, {"body": "four", "in": {"x": "4"}}]
    columns = {"id": [1, 2, 3, 4], "meta": rows, "title": list("abcd")}
    write_table(tmp_path / form, columns)
    assert texts_of("meta.body") == ["one", "", "", "four"]
    assert texts_of("title,meta.in.x") == ["a\n\n1", "b", "c", "d\n\n4"]
    for key, fault in [("meta", "'meta' is not text but struct"), ("meta.none", "no column 'meta.none'")]:
        with pytest.raises(UserError, match=fault):
            texts_of(key)
    write_table(tmp_path / form, columns | {"meta.body": ["literal"] * 4})
    assert texts_of("meta.body") == ["literal"] * 4
    write_table(tmp_path / form, {"meta": rows})
    with pytest.raises(UserError, match="no column 'text'; its columns: 'meta'") as caught:
        texts_of("text")
    assert caught.value.hint == "--text-key meta.body"
