"""THREEFOLD_DEBUG=1: tracebacks, the request log and kept scratch; without it, none of them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from threefold.console import report
from threefold.debug import VARIABLE, is_debugging
from threefold.errors import StorageError
from threefold.scratch import is_kept
from threefold.storage import open_storage
from threefold.storage.local import LocalStorage

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")


@pytest.mark.parametrize(("value", "asks"), [("1", True), ("yes", True), ("0", False), ("", False)])
def test_the_variable(monkeypatch: pytest.MonkeyPatch, value: str, asks: bool) -> None:
    monkeypatch.setenv(VARIABLE, value)
    assert is_debugging() is asks


def raised() -> StorageError:
    try:
        try:
            raise OSError("from s3://me:secret@host/x")
        except OSError as error:
            raise StorageError("cannot read", hint="try again") from error
    except StorageError as error:
        return error


def test_an_error_prints_its_traceback_and_no_password(debugging: None, capsys: Captured) -> None:
    report(raised())
    printed = capsys.readouterr().err
    assert printed.startswith("Traceback (most recent call last):\n")
    assert printed.endswith("error: cannot read\nhint: try again\n")
    assert "in raised" in printed
    assert "s3://***@host/x" in printed
    report(StorageError("was never raised"))
    assert capsys.readouterr().err == "error: was never raised\n"


def test_requests_are_printed(debugging: None, tmp_path: Path, capsys: Captured) -> None:
    storage = open_storage(tmp_path)
    storage.write("a/b", b"12345")
    with pytest.raises(StorageError):
        storage.read("missing")
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(rf"request: write {re.escape(str(tmp_path))} a/b 5 bytes [0-9.]+ ms", first)
    assert re.fullmatch(r"request: read .* missing [0-9.]+ ms: StorageError", second)
    assert storage.local_path("a/b") == tmp_path / "a/b"


def test_scratch_is_kept_and_named(debugging: None, tmp_path: Path, capsys: Captured) -> None:
    assert not is_kept(tmp_path / "missing")
    assert not is_kept(tmp_path), "an empty one"
    (tmp_path / "half").write_bytes(b"x")
    assert is_kept(tmp_path)
    assert capsys.readouterr().err == f"THREEFOLD_DEBUG: {tmp_path} is kept\n"


@pytest.mark.ci
@pytest.mark.slow
def test_a_preprocess_that_fails_keeps_its_scratch_until_the_next(tmp_path: Path) -> None:
    from datakit import train_tokenizer

    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * 50 + "{\n")
    (tmp_path / "b.jsonl").write_text('{"text": "a"}\n' * 50)
    train_tokenizer([str(tmp_path / "b.jsonl")], str(tmp_path / "tok.json"), vocab_size=260)

    def run(source: str, debug: str) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            "-m",
            "datakit",
            "preprocess",
            source,
            "--output",
            "store",
            "--tokenizer",
            "tok.json",
        ]
        environment = {"PATH": "/usr/bin:/bin", VARIABLE: debug}
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
        )

    failed = run("a.jsonl", "1")
    assert (failed.returncode, "is kept" in failed.stderr, "Traceback" in failed.stderr) == (2, True, True)
    assert list((tmp_path / "store" / ".work" / "shards").iterdir())
    again = run("a.jsonl", "")
    assert (again.returncode, "is kept" in again.stderr, "Traceback" in again.stderr) == (2, False, False)
    assert not (tmp_path / "store" / ".work" / "shards").exists()


def test_without_it_nothing_changes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Captured) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert type(open_storage(tmp_path)) is LocalStorage
    (tmp_path / "half").write_bytes(b"x")
    assert not is_kept(tmp_path)
    report(raised())
    assert capsys.readouterr().err == "error: cannot read\nhint: try again\n"
