"""Documents: every format gives its texts with their places; every fault is named with file, line and byte."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from datakit.text.documents import Document, DocumentReader, DocumentRules
from datakit.text.inputs import FileSlice, cut, find_inputs
from threefold.errors import UserError


def reader_of(path: Path, **options: Any) -> DocumentReader:
    [file] = find_inputs([str(path)])
    return DocumentReader(FileSlice(file, 0, file.size_bytes), DocumentRules(**options))


def read(path: Path, **options: Any) -> list[Document]:
    return list(reader_of(path, **options))


def pack(content: bytes, suffix: str, num_frames: int = 1) -> bytes:
    step = -(-len(content) // num_frames) or 1
    parts = [content[at : at + step] for at in range(0, len(content), step)] or [b""]
    how = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}[suffix]
    return b"".join(how(part) for part in parts)


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@given(
    texts=st.lists(st.text(), max_size=20), newline=st.sampled_from(["\n", "\r\n", "\n\n"]), frames=st.integers(1, 4)
)
def test_jsonl(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, texts: list[str], newline: str, frames: int
) -> None:
    encodable = [text.encode("utf-8", "replace").decode() for text in texts]
    content = "".join(json.dumps({"text": text}, ensure_ascii=False) + newline for text in encodable).encode()
    path = tmp_path_factory.mktemp("docs") / f"a.jsonl{suffix}"
    path.write_bytes(pack(content, suffix, frames))
    documents = read(path)
    assert [document.text for document in documents] == encodable
    for document in documents:
        at = document.offset_bytes
        assert json.loads(content[at : content.index(b"\n", at)])["text"] == document.text
        assert content.count(b"\n", 0, at) == document.line


def test_long_lines_cross_blocks(tmp_path: Path) -> None:
    texts = ["é" * 3_000_000, "", "x" * 1_100_000]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts))
    assert [document.text for document in read(path)] == texts


def test_txt_is_one_document_a_file_or_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("eins\r\n\nдва\ntři".encode())
    assert [document.text for document in read(path)] == ["eins\r\n\nдва\ntři"]
    by_line = read(path, txt_split="line")
    assert [document.text for document in by_line] == ["eins", "", "два", "tři"]
    assert [document.offset_bytes for document in by_line] == [0, 6, 7, 14]


FAULTY_LINES = [
    (b'{"body": "x", "id": 1}', "line 3: no key 'text'; its keys: 'body', 'id'"),
    (b'{"text": 7}', "line 3: 'text' is no text but int"),
    (b'["text"]', "line 3: no JSON object"),
    (b'{"text": "x"', "line 3: invalid JSON"),
    (b'{"text": "\\ud800"}', "line 3: invalid JSON"),
    (b'{"text": "\xff"}', "line 3: invalid UTF-8: invalid start byte 0xff at byte 44"),
]


@pytest.mark.parametrize(("line", "fault"), FAULTY_LINES)
@pytest.mark.parametrize("item_bytes", [1000, 20])
def test_a_faulty_line_is_named_also_in_a_later_slice(tmp_path: Path, line: bytes, fault: str, item_bytes: int) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n{"text": "good"}' + b"\n" + line + b"\n")
    items = cut(find_inputs([str(path)]), item_bytes, split_txt=False)
    with pytest.raises(UserError, match=re.escape(fault)) as caught:
        [list(DocumentReader(item.slices[0], DocumentRules())) for item in items]
    assert str(path) in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_invalid_lines_are_skipped_and_counted_where_that_is_asked(tmp_path: Path, suffix: str) -> None:
    lines = [b'{"text": "first"}', *(line for line, _ in FAULTY_LINES), b"", b'{"text": "last"}']
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(pack(b"\n".join(lines), suffix))
    reader = reader_of(path, skip_invalid=True)
    assert [(document.text, document.line) for document in reader] == [("first", 0), ("last", 8)]
    assert (reader.num_lines, reader.skipped) == (9, {"invalid": 6})


def test_txt_that_is_no_utf8_is_skipped_by_file_or_line(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\nthr\xe9e\ntwo\n")
    whole, by_line = reader_of(path, skip_invalid=True), reader_of(path, skip_invalid=True, txt_split="line")
    assert [document.text for document in whole] == []
    assert [(document.text, document.line) for document in by_line] == [("one", 0), ("two", 2)]
    assert whole.skipped == by_line.skipped == {"invalid": 1}


def test_empty_and_long_documents_are_skipped_where_that_is_asked(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ["", "éééé", " \n\u3000", "ééééé", "x"]))
    for options, texts, skipped in [
        ({"skip_empty": True}, ["éééé", "ééééé", "x"], {"empty": 2}),
        ({"max_chars": 4}, ["", "éééé", " \n\u3000", "x"], {"too_long": 1}),
        ({"max_chars": 2, "skip_empty": True}, ["x"], {"empty": 2, "too_long": 2}),
    ]:
        reader = reader_of(path, **options)
        assert [document.text for document in reader] == texts
        assert (reader.num_lines, reader.skipped) == (5, skipped)


def test_the_texts_of_several_keys_are_joined_by_blank_lines(tmp_path: Path) -> None:
    rows = [{"title": "T", "text": "x"}, {"text": "y", "title": None}, {"title": ""}, {"text": "", "title": "U"}]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [document.text for document in read(path, text_key="title,text")] == ["T\n\nx", "y", "", "U"]
    assert [document.text for document in read(path, text_key="text,title")] == ["x\n\nT", "y", "", "U"]
    for row, fault in [
        ({"title": None, "id": 2}, "no key 'title' or 'text' with a text; its keys: 'title', 'id'"),
        ({"title": "x", "text": 7}, "'text' is no text but int"),
    ]:
        path.write_text(json.dumps(row))
        with pytest.raises(UserError, match=fault):
            read(path, text_key="title,text")


def test_the_byte_of_invalid_utf8_is_the_files(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\ntwo\nthr\xe9e\n")
    for split in ("file", "line"):
        with pytest.raises(UserError, match=r"a\.txt, line 3: invalid UTF-8: .* 0xe9 at byte 11"):
            read(path, txt_split=split)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("kept", [0.1, 0.5, 0.99])
def test_truncated_compressed_files_are_refused(tmp_path: Path, suffix: str, kept: float) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    lines = "".join(json.dumps({"text": f"{i * 7919 % 1000}"}) + "\n" for i in range(5000))
    packed = pack(lines.encode(), suffix, 2)
    path.write_bytes(packed[: int(len(packed) * kept)])
    for skip_invalid in (False, True):  # no rule goes on past a loss of unknown size
        with pytest.raises(UserError, match=r"a\.jsonl.* is (truncated|damaged)"):
            read(path, skip_invalid=skip_invalid)


def test_zst_files_of_long_windows_and_with_skippable_frames_are_read(tmp_path: Path) -> None:
    content = b"".join(b'{"text": "%d"}\n' % i for i in range(1000))
    parameters = zstandard.ZstdCompressionParameters(window_log=31, enable_ldm=True)  # as `zstd --long=31` does
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    skippable = (0x184D2A50).to_bytes(4, "little") + (5).to_bytes(4, "little") + b"index"
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(skippable + compressor.compress(content) + compressor.flush() + skippable)
    assert [document.text for document in read(path)] == [str(i) for i in range(1000)]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_damaged_compressed_files_are_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(b"no compressed data at all, whatever the name says")
    with pytest.raises(UserError, match="is damaged"):
        read(path)


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datakit.text.documents.MAX_LINE_BYTES", 1 << 20)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"x" * (3 << 20))
    with pytest.raises(UserError, match="line at byte 0 is longer"):
        read(path)


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}\n' * 10)
    [file] = find_inputs([str(path)])
    path.write_text('{"text": "x"}\n')
    with pytest.raises(UserError, match="became shorter"):
        list(DocumentReader(FileSlice(file, 0, file.size_bytes), DocumentRules()))
