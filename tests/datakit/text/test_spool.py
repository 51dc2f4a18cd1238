"""Spool: what comes through pipes, read once; nothing stays behind."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from datakit.text.inputs import FileSlice, cut, find_inputs
from datakit.text.spool import Spool
from tests.datakit.conftest import write_jsonl


def test_a_pipe_is_waited_for_aloud_copied_and_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    content = write_jsonl(tmp_path / "a.jsonl", [str(number) for number in range(200)]).read_bytes()
    os.mkfifo(tmp_path / "pipe")
    lines: list[str] = []
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(content,))
    spool = Spool(lambda line: (lines.append(line), writer.start())[0])
    [file] = find_inputs([str(tmp_path / "pipe")], spool)
    writer.join()
    assert lines == [f"waiting for {tmp_path}/pipe, which is copied to a file in {tmp_path}/temporary first"]
    assert (file.kind, file.size_bytes) == ("jsonl", len(content))
    slices: list[FileSlice] = [part for item in cut([file], 1000, split_txt=False) for part in item.slices]
    assert len(slices) > 3
    assert b"".join(part.file.read_range(part.start, part.stop) for part in slices) == content
    assert not list((tmp_path / "temporary").iterdir())


def run(words: list[str], text: bytes, folder: Path) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(
        [sys.executable, "-m", "datakit", "preprocess", *words], input=text, capture_output=True, cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )  # fmt: skip


@pytest.mark.ci
@pytest.mark.slow
def test_standard_input_makes_the_tokens_of_a_file_and_the_same_again_is_complete(
    tmp_path: Path, tokenizer_path: str
) -> None:
    text = write_jsonl(tmp_path / "a.jsonl", ["one", "two"]).read_bytes()
    words = ["-", "--output", "piped", "--tokenizer", tokenizer_path, "--workers", "1"]
    first = run(words, text, tmp_path)
    assert first.returncode == 0, first.stderr
    assert b"waiting for standard input" in first.stderr
    assert b"complete already" in run(words, text, tmp_path).stderr
    other = run(words, text.replace(b"one", b"six"), tmp_path)
    assert other.returncode == 2
    assert b"piped was made of other content: of 1 source files 1 changed since: -" in other.stderr
