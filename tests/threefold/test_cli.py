"""The shared command-line voice: one error line, one hint, the documented exit code."""

import argparse
import errno
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import orjson
import pytest

from threefold.cli import Parser, print_json, run
from threefold.errors import CheckFailed, StorageError, UserError, quoted
from threefold.storage import local


def parser_for(handler: Callable[[argparse.Namespace], int | None]) -> Parser:
    parser = Parser(prog="tool")
    verbs = parser.add_subparsers()
    verb = verbs.add_parser("do")
    verb.add_argument("--count", type=int, default=1)
    verb.add_argument("--kind", choices=["small", "large"])
    verb.set_defaults(handler=handler)
    return parser


@pytest.mark.parametrize("kit", ["datakit", "ckptkit", "trainer"])
def test_each_command_has_the_version(kit: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        import_module(f"{kit}.cli").main(["--version"])
    assert not ended.value.code
    assert capsys.readouterr().out == f"threefold {version('threefold')}\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("the value 3 is odd", hint="tool do --count 2"), 2),
        (CheckFailed("part-00003.index is damaged"), 1),
        (StorageError("cannot write x: disk full"), 3),
        (PermissionError(13, "Permission denied", "x"), 3),
        (MemoryError("unable to allocate 8 GiB"), 3),
    ],
)
def test_an_error_becomes_one_line_and_its_exit_code(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: argparse.Namespace) -> int:
        raise error

    assert run(parser_for(fail), ["do"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert lines[0].startswith("error: ")
    hint = f"check the permissions: ls -ld {Path.cwd()}" if isinstance(error, OSError) else getattr(error, "hint", None)
    assert lines[1:] == ([f"hint: {hint}"] if hint else [])


def test_success_is_zero_and_our_own_bugs_keep_their_traceback() -> None:
    assert run(parser_for(lambda _: None), ["do"]) == 0

    def bug(_: argparse.Namespace) -> int:
        raise AssertionError("an invariant")

    with pytest.raises(AssertionError):
        run(parser_for(bug), ["do"])


@pytest.mark.parametrize("argv", [["do", "--count", "x"], ["do", "--coun", "2"], ["fly"]])
def test_a_usage_fault_exits_2_with_a_hint(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(parser_for(lambda _: None), argv)
    assert stopped.value.code == 2
    assert "error: " in (err := capsys.readouterr().err)
    assert "hint: tool" in err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["doo"], "verb: there is no doo, did you mean do?"),
        (["x"], "verb: there is no x, choose from do"),
        (["do", "--kind", "smal"], "--kind: there is no smal, did you mean small?"),
    ],
)
def test_a_choice_that_does_not_exist_is_answered_with_the_nearest(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(parser_for(lambda _: None), argv)
    assert capsys.readouterr().err.startswith(f"error: {message}\n")


def test_no_verb_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(parser_for(lambda _: None), []) == 2
    assert "usage: tool" in capsys.readouterr().out


def test_json_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"step": 7})
    assert json.loads(capsys.readouterr().out) == {"step": 7}


PRINTING = """
import sys; from threefold.cli import Parser, run
parser = Parser(); verbs = parser.add_subparsers(); verb = verbs.add_parser("do")
verb.set_defaults(handler=lambda _: print(sys.argv[2] * int(sys.argv[1])))
sys.exit(run(parser, sys.argv[3:]))
"""


def start(*arguments: str, closes: str = "", **options: Any) -> subprocess.Popen[bytes]:
    """A program that prints a text so many times, as a shell starts it, with a usual buffer before its output."""
    command = ["sh", "-c", f'exec "$@" {closes}', "sh", sys.executable, "-c", PRINTING, *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    options.setdefault("env", environment)
    return subprocess.Popen(command, stderr=subprocess.PIPE, **options)


@pytest.mark.parametrize("arguments", [["1", "x", "do"], ["1000000", "x", "do"], ["1", "x", "--help"]])
def test_a_closed_pipe_is_no_error(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    process = start(*arguments, stdout=writer)
    os.close(writer)
    os.close(reader)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")


@pytest.mark.parametrize("arguments", [["1", "x", "do"], ["1000000", "x", "do"], ["1", "x", "--help"]])
def test_output_that_cannot_be_written_is_an_error(arguments: list[str]) -> None:
    process = start(*arguments, closes="> /dev/full")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 3
    assert re.fullmatch(rb"error: [^\n]*No space left on device\n(hint: [^\n]*df -h[^\n]*\n)?", err)


@pytest.mark.parametrize("closes", [">&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_error(closes: str) -> None:
    process = start("1", "x", "do", closes=closes)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")


def test_names_that_the_terminal_has_no_letters_for_are_printed() -> None:
    process = start("1", "b\udcff", "do", stdout=subprocess.PIPE, env=os.environ | {"PYTHONIOENCODING": "utf-8"})
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, b"b\\udcff\n", b"")


@pytest.mark.parametrize("kind", [UserError, CheckFailed, StorageError])
def test_an_error_survives_pickling(kind: type[UserError]) -> None:
    error = pickle.loads(pickle.dumps(kind("no", hint="yes")))
    assert (type(error), error.message, error.hint) == (kind, "no", "yes")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--ouput", "x"], "unknown argument --ouput, did you mean --output?"),
        (["--ouput=x"], "unknown argument --ouput, did you mean --output?"),
        (["--kind", "x"], "the following arguments are required: --output"),
        (["--kind", "x", "--", "--ouput"], "the following arguments are required: --output"),
    ],
)
def test_a_misspelt_flag_is_named_before_the_required_one_that_it_leaves_missing(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = Parser(prog="tool")
    parser.add_argument("--output", required=True)
    parser.add_argument("--kind")
    with pytest.raises(SystemExit):
        parser.parse_args(argv)
    assert capsys.readouterr().err == f"error: {message}\nhint: tool --help\n"


WAITING = """
import sys, time
from threefold.cli import Parser, run

def wait(arguments):
    try:
        print("waiting", flush=True)
        for _ in range(600):  # a signal that comes just before a sleep does not shorten it
            time.sleep(0.1)
    finally:
        print("cleaning up", flush=True)
        time.sleep(float(sys.argv[1]))
        print("cleaned up", flush=True)

parser = Parser()
parser.add_argument("seconds")
parser.set_defaults(handler=wait)
sys.exit(run(parser))
"""


@pytest.mark.parametrize(
    ("number", "code", "message"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")]
)
def test_a_signal_unwinds_a_verb_and_a_second_one_ends_it_at_once(number: str, code: int, message: str) -> None:
    sent = signal.Signals[number]
    for seconds, expected in (("0", code), ("60", -sent)):
        process = subprocess.Popen(
            [sys.executable, "-c", WAITING, seconds], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(sent)
        process.send_signal(sent)  # as `timeout` does: to the process, and to its group
        assert process.stdout.readline() == "cleaning up\n"
        if expected < 0:
            process.send_signal(sent)
        assert process.stderr is not None
        out, err = process.stdout.read(), process.stderr.read()
        assert (process.wait(timeout=60), out) == (expected, "" if expected < 0 else "cleaned up\n")
        assert err == ("" if expected < 0 else f"{message}\n")


@pytest.mark.parametrize(
    ("raised", "message", "hint"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/tmp/x/y"), "/tmp/x/y: No space left", "df -h /"),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "/tmp"), "/tmp: Disk quota exceeded", "the quota is used up"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device", "df -h"),
        (
            FileNotFoundError(2, "No usable temporary directory found in ['/tmp']"),
            "no temporary folder can be",
            "TMPDIR=",
        ),
        (ConnectionError("the server hung up"), "the server hung up", ""),
    ],
)
def test_a_system_error_that_nobody_put_into_words_has_a_hint(
    raised: OSError, message: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> None:
        raise raised

    parser = Parser(prog="tool")
    parser.set_defaults(handler=fail)
    assert run(parser, []) == 3
    error, *hints = capsys.readouterr().err.splitlines()
    assert message in error
    assert "Errno" not in error
    assert [hint in each for each in hints] == ([True] if hint else [])


def test_a_full_temporary_folder_is_reported_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def use_one(_: object) -> None:
        tempfile.TemporaryFile()  # noqa: SIM115  # it cannot be made

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(os, "open", write)
    monkeypatch.setattr(local, "_is_full", lambda folder: folder == str(tmp_path))
    parser = Parser(prog="tool")
    parser.set_defaults(handler=use_one)
    assert run(parser, []) == 3
    assert capsys.readouterr().err == (
        f"error: the temporary folder is full: {tmp_path}\n"
        f"hint: free some space in {tmp_path}, or export TMPDIR=/a/folder/with/room\n"
    )


@pytest.mark.parametrize(
    ("encode", "argument", "message", "hint"),
    [
        (str.encode, "a\udcff", r"'a\udcff'", r"mv $'a\xff' NEW, or choose another name"),
        (orjson.dumps, "a\udcff", r"'a\udcff'", r"mv $'a\xff' NEW, or choose another name"),
        (str.encode, "a", r"'b\udcff'", "find . | grep -avx '.*' names such files"),
        (orjson.dumps, "a", "a name that was found", "find . | grep -avx '.*' names such files"),
    ],
)
def test_a_name_that_is_not_utf8_is_an_error_in_words(
    capsys: pytest.CaptureFixture[str], encode: Callable[[str], bytes], argument: str, message: str, hint: str
) -> None:
    parser = Parser(prog="x")
    parser.add_argument("name")
    parser.set_defaults(handler=lambda arguments: encode(arguments.name) and encode("b\udcff"))
    assert run(parser, [argument]) == 2
    error = f"error: {message} is not UTF-8, and cannot be stored or sent"
    assert capsys.readouterr().err.splitlines() == [error, f"hint: {hint}"]
    parser.set_defaults(handler=lambda _: "é".encode("ascii"))
    with pytest.raises(UnicodeEncodeError):
        run(parser, [argument])


@pytest.mark.parametrize("name", [b"o_\xff", b"a b", b"tab\there", b"it's\\\xc3\x28", "né\u200b".encode(), b"\xff1"])
def test_a_hint_names_any_file_so_that_a_shell_finds_it(name: bytes) -> None:
    word = quoted(os.fsdecode(name))
    assert word.isprintable()
    assert subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, check=True).stdout == name
