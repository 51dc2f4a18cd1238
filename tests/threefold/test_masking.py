"""Passwords are masked wherever a URL may appear, what a terminal acts on is escaped, and all else stays as it is."""

import pickle
import traceback

import pytest

from threefold.cli import log, print_json, print_line, report
from threefold.errors import StorageError, UserError
from threefold.masking import masked, masked_values, printable, shown_cause
from threefold.storage import open_storage
from threefold.storage.fsspec import FsspecStorage

MASKED = {
    "s3://AKIA:wJal/r+x@bucket/run": "s3://***@bucket/run",
    "http://u:p@127.0.0.1:8333/x@y": "http://***@127.0.0.1:8333/x@y",
    "http://u:p@ss@host/x": "http://***@host/x",
    "http://u:12@h": "http://***@h",
    "https://token@host/x": "https://***@host/x",
    "redis://:pw@h": "redis://***@h",
    "cannot copy ftp://a:b@c/x to 'sftp://d:e@f/g@h'": "cannot copy ftp://***@c/x to 'sftp://***@f/g@h'",
    "s3://a:b@c,every=10": "s3://***@c,every=10",
    "https://h/x?X-Amz-Signature=a%2B&n=1&X-Amz-Security-Token=z#f": (
        "https://h/x?X-Amz-Signature=***&n=1&X-Amz-Security-Token=***#f"
    ),
    "https://acc.blob/x?sv=1&SIG=ab%2B&se=2": "https://acc.blob/x?sv=1&SIG=***&se=2",
    "http://h/x?access_token=abc": "http://h/x?access_token=***",
}
KEPT = [
    "s3://bucket/run", "http://127.0.0.1:8080/test/x@y", "http://h:80", "abfs://c@acc.dfs.core.windows.net/x",
    "sftp://user@host/x", "user:p@ss in a text", "s3://bucket/step=1/x@a:b", "token=4 tokens=5 ?tokens=3",
    "a\nb é 日本",
]  # fmt: skip


@pytest.mark.parametrize("text", MASKED)
def test_passwords_and_signatures_are_masked(text: str) -> None:
    assert masked(text) == MASKED[text]
    assert masked(MASKED[text]) == MASKED[text]
    assert masked_values({"a": [text, 1], text: None}) == {"a": [MASKED[text], 1], MASKED[text]: None}


@pytest.mark.parametrize("text", KEPT)
def test_all_else_stays(text: str) -> None:
    assert masked(text) == text
    assert printable(text, lines=True) == text


def test_errors_and_all_that_is_printed_are_masked(capsys: pytest.CaptureFixture[str]) -> None:
    url = "ftp://me:secret@host/run"
    error = StorageError(f"cannot read {url}", hint=f"ckptkit ls {url}")
    assert "secret" not in f"{error}{error!r}{error.args}{pickle.loads(pickle.dumps(error))}"
    report(error)
    report(OSError(f"no answer from {url}"))
    log(f"wrote {url}")
    print_line(f"{url}: 3 files")
    print_json({"url": url})
    captured = capsys.readouterr()
    assert "secret" not in captured.out + captured.err
    assert captured.err.count("ftp://***@host/run") == 4
    print_json({"text": url}, masks=False)
    assert url in capsys.readouterr().out, "a document's text"


def test_what_a_terminal_acts_on_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    print_line("a\x1b[31mb\nc\u202e\x00")
    report(UserError("first\nsecond\x1b[2J\r"))
    captured = capsys.readouterr()
    assert captured.out == "a\\x1b[31mb\\nc\\u202e\\x00\n"
    assert captured.err == "error: first\nsecond\\x1b[2J\\r\n"


def test_what_a_client_library_says_shows_no_password_in_a_traceback() -> None:
    class Chatty:
        """As a file system whose errors repeat its address."""

        def info(self, path: str) -> None:
            raise RuntimeError("no route to ftp://me:secret@host/run")

    storage = FsspecStorage("memory://me:secret@host/run")
    storage._opened = Chatty()
    with pytest.raises(StorageError) as raised:
        storage.info("key")
    assert "secret" not in "".join(traceback.format_exception(raised.value))
    assert "no route to ftp://***@host/run" in str(raised.value)
    harmless = RuntimeError("no route")
    assert shown_cause(harmless) is harmless


def test_a_storage_shows_no_password_and_is_opened_again_by_its_address() -> None:
    storage = open_storage("memory://me:secret@host/run/")
    assert (storage.url, storage.address) == ("memory://***@host/run", "memory://me:secret@host/run")
    storage.write("key", b"x")
    assert open_storage(storage.address).read("key") == b"x"


@pytest.mark.parametrize("url", ["s3://KEY:secret@bucket/run", "s3://KEY:sec/ret@bucket/run", "gs://me@bucket/x"])
def test_credentials_in_a_bucket_s_url_are_refused_by_name(url: str) -> None:
    with pytest.raises(UserError, match="credentials, which are read from the environment alone") as raised:
        open_storage(url)
    assert "ret@" not in str(raised.value)
    assert raised.value.hint


def test_an_endpoint_s_password_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://me:secret@127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(StorageError) as raised:
        open_storage("s3://bucket/run").info("key")
    assert "secret" not in "".join(traceback.format_exception(raised.value))
    assert "***@127.0.0.1:9" in str(raised.value)
