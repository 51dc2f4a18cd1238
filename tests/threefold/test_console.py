"""Facts, tables and progress: rich on a terminal, plain lines of at most 100 columns elsewhere."""

import io
import re
import sys

import pytest

from threefold import console
from threefold.console import WIDTH, fitting, live, print_facts, print_table

Console = pytest.CaptureFixture[str]
COLOUR = r"\x1b\[[0-9;]*3[0-9][0-9;]*m"
FACTS = [("model", "many words " * 30), ("save", "s3://bucket/" + "x" * 120)]


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def open_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Make both output streams one terminal of 80 columns that has colours."""
    stream = Terminal()
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "80"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def test_what_fits_is_kept_in_order() -> None:
    assert fitting(["a" * 40, "b" * 40, "c" * 16, "d"]) == "  ".join(["a" * 40, "b" * 40, "c" * 16])
    assert fitting(["a" * 200, "b"]) == "a" * 200
    assert fitting([]) == ""


def test_facts_are_wrapped_and_a_url_stays_whole(capsys: Console) -> None:
    print_facts(FACTS)
    *wrapped, url = capsys.readouterr().err.splitlines()
    assert len(wrapped) > 2
    assert all(len(line) <= WIDTH and line.startswith(("model  many", "       ")) for line in wrapped)
    assert url == f"save   {FACTS[1][1]}"


def test_a_table_is_as_wide_as_its_cells(capsys: Console) -> None:
    print_table(["step", "marks"], [["5", "newest"], ["1000", ""]], left={"marks"})
    assert capsys.readouterr().out == "step  marks\n   5  newest\n1000\n"
    print_table(["step"], [])
    assert capsys.readouterr().out == "step\n"


def test_progress_off_a_terminal_is_a_line_now_and_then(capsys: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 4.0, 11.0, 11.0, 12.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(now))
    with live(lines_every_s=10) as shown:
        for done in (1, 2, 3):
            shown.show(f"{done} of 4", done / 4)
        shown.say("found [nothing]")
    assert capsys.readouterr().err == " 50.0%  2 of 4\nfound [nothing]\n"


def test_on_a_terminal_all_is_there_within_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    print_facts(FACTS)
    print_table(["step", "marks"], [["5", "[newest]"]], left={"marks"})
    with live() as shown:
        shown.show("3 of 4 [files]", 0.75)
        shown.say("found [nothing]")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    assert max(map(len, re.split(r"[\r\n]+", text))) <= 80
    for words in ("many words", "[newest]", "75.0% 3 of 4 [files]", "found [nothing]"):
        assert words in text
    assert "x" * 120 in "".join(text.split())
    assert "\x1b[1mmodel" in terminal.getvalue()
    assert re.search(COLOUR, terminal.getvalue())


def test_no_color_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1")
    with live() as shown:
        shown.show("3 of 4", 0.75)
    assert terminal.getvalue()
    assert not re.search(COLOUR, terminal.getvalue())
