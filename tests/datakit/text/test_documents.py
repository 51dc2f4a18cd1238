"""Documents: every format gives its texts with their places; every fault is named with file, line and byte."""

import gzip
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from datakit.text.documents import Document, DocumentReader, DocumentRules
from datakit.text.inputs import FileSlice, cut, find_inputs
from datakit.text.json_text import JsonText
from threefold.errors import StorageError, UserError


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


PLAIN_LINES = st.builds(lambda text: json.dumps({"id": 1, "text": text}).encode(), st.text("aé\u2028\x85", max_size=9))
ODD_LINES = [
    b"", b" \t", b"\xef\xbb\xbf", b'\xef\xbb\xbf{"text": "marked"}', b'{"text": "CR LF"}\r', b'{"text": "CR\rinside"}',
    b'{"text": "a", "score": NaN}', b'{"text": "\\ud800"}', b'{"text": "\\ud83d\\ude00"}', b'  {"text": "blanks"}  ',
    b'{"text": "\xff"}', b'{"text": 7}', b'{"text": null}', b'{"body": "x"}', b'{"text": "x"', b'{"text": "a\0"}',
    b'{"text":"a"},{"text":"b"}', b'{"text":"}', b'{"}', b'{"text":[{}', b"{}]}", b"1,2", b'["text"]', b'"text"', b"7",
    b'{"text": "twice", "text": "last"}', b'{"text": "%s"}' % (b"long" * 99), b"[" * 2000, b'{"text": ""}',
]  # fmt: skip


@given(
    lines=st.lists(PLAIN_LINES | st.sampled_from(ODD_LINES), max_size=12),
    end=st.sampled_from([b"", b"\n", b"\r\n"]),
    block_bytes=st.sampled_from([7, 100, 1000]),
    rules=st.builds(
        DocumentRules, skip_invalid=st.booleans(), skip_empty=st.booleans(), max_chars=st.sampled_from([None, 5])
    ),
)
def test_lines_read_at_once_are_those_read_one_by_one(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], end: bytes, block_bytes: int, rules: DocumentRules
) -> None:
    path = tmp_path_factory.mktemp("docs") / "a.jsonl"
    path.write_bytes(b"\n".join(lines) + end)
    [file] = find_inputs([str(path)])

    def outcome() -> tuple[Any, ...]:
        part = FileSlice(file, 0, file.size_bytes)
        reader = DocumentReader(part, rules, with_digest=True, read_bytes=block_bytes)
        found, error = list[Document](), None
        try:
            found.extend(reader)  # keeps what came before a fault
        except UserError as fault:
            error = fault.message, fault.hint
        return found, error, reader.num_lines, list(reader.skipped.items()), reader.num_replaced, reader.digest

    with pytest.MonkeyPatch.context() as patch:
        at_once = outcome()
        patch.setattr(JsonText, "find_all", lambda *_: None)
        assert at_once == outcome()


def test_only_a_block_with_an_odd_line_is_read_line_by_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, odd = b'{"text": "%s"}\n' % (b"x" * 26_000), b'{"a": NaN, "text": "x"}\n'  # ten lines a block
    path = tmp_path / "a.jsonl"
    path.write_bytes(plain * 20 + odd + plain * 99)
    singles = list[bytes]()
    find = JsonText.find
    monkeypatch.setattr(JsonText, "find", lambda self, line: singles.append(line) or find(self, line))
    assert len(read(path)) == 120
    assert singles.count(odd) == 1
    assert len(singles) <= 10


def test_a_long_line_is_not_copied_to_be_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = list[int]()
    find_all = JsonText.find_all
    monkeypatch.setattr(JsonText, "find_all", lambda self, lines: sizes.append(len(lines)) or find_all(self, lines))
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": "x" * size}) + "\n" for size in (9, 3 << 20, 9)))
    assert [len(document.text) for document in read(path)] == [9, 3 << 20, 9]
    assert sizes == [len('{"text": "xxxxxxxxx"}\n')] * 2


FAULTY_LINES = [
    (b'{"body": "x", "id": 1}', "line 3: no key 'text'; its keys: 'body', 'id'"),
    (b'{"text": 7}', "line 3: 'text' is not text but int"),
    (b'["text"]', "line 3: no JSON object"),
    (b'{"text": "x"', "line 3: invalid JSON"),
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
    assert [(document.text, document.line) for document in reader] == [("first", 0), ("last", 7)]
    assert (reader.num_lines, reader.skipped) == (8, {"invalid": 5})


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
        ({"title": "x", "text": 7}, "'text' is not text but int"),
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
@pytest.mark.parametrize("kept_share", [0.1, 0.5, 0.99])
def test_truncated_compressed_files_are_refused(tmp_path: Path, suffix: str, kept_share: float) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    lines = "".join(json.dumps({"text": f"{i * 7919 % 1000}"}) + "\n" for i in range(5000))
    packed = pack(lines.encode(), suffix, 2)
    path.write_bytes(packed[: int(len(packed) * kept_share)])
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


def test_a_line_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"x" * (3 << 20))
    [file] = find_inputs([str(path)])
    with pytest.raises(UserError, match="line at byte 0 is longer than 1048576 bytes"):
        list(DocumentReader(FileSlice(file, 0, file.size_bytes), DocumentRules(), max_line_bytes=1 << 20))


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}\n' * 10)
    [file] = find_inputs([str(path)])
    path.write_text('{"text": "x"}\n')
    with pytest.raises(UserError, match="became shorter"):
        list(DocumentReader(FileSlice(file, 0, file.size_bytes), DocumentRules()))


def test_a_file_that_changes_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}\n')
    documents = iter(reader_of(path))
    next(documents)
    os.utime(path)
    with pytest.raises(UserError, match=r"a\.jsonl changed while it was read"):
        next(documents)


def test_lone_surrogates_and_byte_order_marks_of_files_and_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a\\ud800"}\n\xef\xbb\xbf{"text": "b", "score": NaN}\n\xef\xbb\xbf\n')
    reader = reader_of(path)
    assert [(document.text, document.offset_bytes) for document in reader] == [("a\ufffd", 0), ("b", 23)]
    assert reader.num_replaced == 1
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\n\xef\xbb\xbftwo")
    assert [document.text for document in read(path)] == ["one\n\ufefftwo"]
    assert [document.text for document in read(path, txt_split="line")] == ["one", "two"]


def test_a_text_beyond_memory_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    with path.open("wb") as file:
        file.truncate(1 << 43)
    with pytest.raises(StorageError, match=rf"a\.txt: a document of {1 << 43:,} bytes does not fit") as caught:
        read(path)
    assert caught.value.hint == "give fewer --workers, or --txt-split line if each line is a document"
