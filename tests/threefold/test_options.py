"""Options are fields of dataclasses: flags, tables, arrays of tables, ranges, help and errors come from them alone."""

import argparse
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from threefold.cli import Parser
from threefold.errors import UserError
from threefold.flags import Settings, add_options, add_settings, read_options, settings, settings_of
from threefold.options import FlagText, argument, leaves, merge, option, read_toml, walk


@dataclass(frozen=True, slots=True)
class Source:
    """One of an array of tables."""

    path: str = option(..., "where it is")
    weight: float = option(1.0, "how much of it", above=0)


@dataclass(frozen=True, slots=True)
class Data:
    """A table."""

    sources: tuple[Source, ...] = option((), "what is read")
    seed: int = option(0, "which order", minimum=0, maximum=9)


@dataclass(frozen=True, slots=True)
class Tables:
    """Tables of a configuration."""

    data: Data = field(default_factory=Data)
    name: str | None = option(None, "what it is called")


def filled(tables: dict[str, Any], flags: dict[str, FlagText] | None = None) -> tuple[Tables, list[str]]:
    faults: list[Any] = []
    found = walk(Tables, merge(tables, flags or {}), faults)
    return found, [text for _, text in faults]


def test_arrays_of_tables_are_tuples_of_dataclasses(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('[[data.sources]]\npath = "a"\n[[data.sources]]\npath = "b"\nweight = 2\n')
    expected = Tables(Data((Source("a"), Source("b", 2.0))))
    assert filled(read_toml(str(path), sample="a.toml")) == (expected, [])


def test_a_file_that_is_nested_without_end_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("a = " + "[" * 100_000)
    with pytest.raises(UserError, match=r"cannot read .*a.toml as TOML"):
        read_toml(str(path), sample="a.toml")


def test_each_text_of_a_flag_is_a_table_of_the_array() -> None:
    parser = argparse.ArgumentParser()
    add_settings(parser, Tables)
    given = settings_of(parser.parse_args(["--data.sources", "path=a", "--data.sources", "path=b, weight=2"]))
    assert filled({}, given) == (Tables(Data((Source("a"), Source("b", 2.0)))), [])
    assert "--data.sources KEY=VALUE,..." in parser.format_help()


@dataclass(frozen=True, slots=True)
class Sized:
    """A configuration with flags that are short for values."""

    size: str = option("small", "how much", shorthands={"--large": "large", "--tiny": "tiny"})


def test_flags_that_are_short_for_two_values_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="tool")
    add_settings(parser, Sized)
    assert settings_of(parser.parse_args(["--large", "--large"]))["size"].text == "large"
    with pytest.raises(SystemExit):
        parser.parse_args(["--tiny", "--large"])
    assert "--tiny and --large are two values of --size" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ([{"path": "a", "weigth": 1}], "data.sources[0].weigth: unknown key, did you mean data.sources[0].weight?"),
        ([{"path": "a"}, {"path": "b", "weight": 0}], "data.sources[1].weight: must be above 0, got 0"),
        ([{"weight": 1}], "data.sources[0].path: must be given"),
        ({"path": "a"}, "data.sources: must be tables [[data.sources]], got {'path': 'a'}"),
        (FlagText("a", "--data.sources"), "data.sources: must be KEY=VALUE,KEY=VALUE, got 'a' (from --data.sources)"),
        (
            FlagText("path=a,weight=x", "--data.sources"),
            "data.sources[0].weight: must be a number, got 'x' (from --data.sources)",
        ),
    ],
)
def test_faults_in_an_array_of_tables_name_the_table(value: object, fault: str) -> None:
    assert filled({"data": {"sources": value}})[1] == [fault]


def test_all_faults_are_found_at_once() -> None:
    found, faults = filled({"data": {"seed": 10, "sources": [{"path": 1}]}, "nam": "x", "name": 2})
    assert found == Tables(Data((Source(None),)))  # type: ignore[arg-type]
    assert faults == [
        "nam: unknown key, did you mean name?",
        "data.sources[0].path: must be text, got 1",
        "data.seed: must be at least 0 and at most 9, got 10",
        "name: must be text, got 2",
    ]


def even(text: str) -> int:
    if not text.isdecimal() or int(text) % 2:
        raise ValueError(f"{text!r} is not an even number")
    return int(text)


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Options of several verbs."""

    json: bool = option(False, "print one JSON document")


@dataclass(frozen=True, kw_only=True)
class Options(Shared):
    """Options of a verb."""

    source: str = argument("SRC", "where from")
    others: tuple[str, ...] = argument("MORE", "and from there", ())
    output: str = option(..., "where to", metavar="DIR")
    kind: Literal["small", "large"] = option("small", "how much at 100%")
    count: int | None = option(None, "how many", minimum=1, below=9, metavar="N", flags=["--number"], exclusive="size")
    pairs: int | None = option(None, "an even number", parse=even, exclusive="size")
    tags: tuple[int, ...] = option((), "marks", flag="--tag", repeats=True, parse=even)
    workers: int = option(lambda: 3, "processes")
    flags: Settings = settings(Tables, hidden="Every key is a flag too: tool other --help lists them.")


@pytest.fixture
def parser() -> Parser:
    made = Parser(prog="tool")
    add_options(made, Options)
    return made


def test_a_verbs_options_are_read_into_the_dataclass(parser: Parser) -> None:
    words = ["a", "b", "c", "--output", "o", "--number", "4", "--tag", "2", "--tag", "4", "--data.seed", "x"]
    found = read_options(Options, parser.parse_args(words))
    flags = {"data.seed": FlagText("x", "--data.seed")}
    assert found == Options(source="a", others=("b", "c"), output="o", count=4, tags=(2, 4), flags=flags)
    assert found.workers == 3
    assert read_options(Options, parser.parse_args(["a", "--output", "o"])) == Options(source="a", output="o")


def test_help_shows_what_the_fields_say_and_no_default_that_is_none(
    parser: Parser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = parser.format_help()
    assert "--kind {small,large}" in text
    assert "how much at 100% (default: small)" in text
    assert re.search(r"--count( N)?, --number N\s", text)  # Python 3.13 names the value once
    assert "processes (default: 3)" in text
    assert "[--count N | --pairs PAIRS]" in " ".join(text.split())
    assert "SRC [MORE ...] [flags]" in text
    assert text.endswith("Every key is a flag too: tool other --help lists them.\n")
    assert "data.seed" not in text
    assert "None" not in text
    assert "False" not in text


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--count", "0"], "argument --count/--number: '0' is not a whole number >= 1 and < 9"),
        (["--count", "x"], "argument --count/--number: 'x' is not a whole number >= 1 and < 9"),
        (["--pairs", "3"], "argument --pairs: '3' is not an even number"),
        (["--tag", "3"], "argument --tag: '3' is not an even number"),
        (["--kind", "larg"], "--kind: there is no larg, did you mean large?"),
        (["--count", "1", "--pairs", "2"], "argument --pairs: not allowed with argument --count/--number"),
        (["--outptu", "x"], "unknown argument --outptu, did you mean --output?"),
    ],
)
def test_a_fault_names_the_flag_and_what_fits(
    parser: Parser, words: list[str], fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["a", "--output", "o", *words])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {fault}\nhint: tool --help\n"


def test_leaves_name_every_field_once() -> None:
    assert [(leaf.name, leaf.flag) for leaf in leaves(Tables)] == [
        ("data.sources", "--data.sources"),
        ("data.seed", "--data.seed"),
        ("name", "--name"),
    ]


def test_a_file_that_is_missing_or_not_toml_has_a_sample_in_the_hint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no configuration file") as missing:
        read_toml(str(tmp_path / "none"), sample="a.toml")
    assert missing.value.hint == "start from a.toml"
    (tmp_path / "bad").write_bytes(b"[a")
    with pytest.raises(UserError, match="as TOML"):
        read_toml(str(tmp_path / "bad"), sample="a.toml")
    with pytest.raises(UserError, match=f"^cannot read {tmp_path} as TOML: Is a directory\n"):
        read_toml(str(tmp_path), sample="a.toml")


@dataclass(frozen=True, slots=True)
class Grown:
    """A table with an option of two words."""

    sizes: tuple[int, ...] = option((), "how large", flags=["--s"], metavar=("FIRST", "LAST"))


@pytest.mark.parametrize("words", [["--s", "3", "4"], ["--s=3,4"], ["--s", "3 4"], ["--sizes", "3,4"]])
def test_an_option_of_several_words_takes_them_in_one_text_too(words: list[str]) -> None:
    parser = Parser(prog="tool")
    parser.add_argument("config")
    add_settings(parser, Grown)
    parser.reword(None)
    read = parser.parse_args([*words, "run.toml"])
    assert (read.config, walk(Grown, merge({}, settings_of(read)), [])) == ("run.toml", Grown((3, 4)))


@pytest.mark.parametrize("words", [["--s", "3"], ["--sizes=3,4,5"], ["--s", "3", "--sizes", "4", "5"], ["--s"]])
def test_an_option_of_several_words_needs_each(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="tool")
    add_settings(parser, Grown)
    parser.reword(None)
    with pytest.raises(SystemExit):
        parser.parse_args(words)
    assert " FIRST LAST: each needs a value" in capsys.readouterr().err
