"""From TOML and flags to a Config: one walker over tomllib and the dataclasses that reports every fault at once.

The order of precedence is defaults, then the file, then flags. Each field is the dotted flag `--table.field`; some have
short ones. A flag's text is parsed here, by the type of its field, so that its faults are reported with all others.
"""

import argparse
import dataclasses
import difflib
import math
import operator
import tomllib
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from threefold.errors import UserError
from trainer.config import Config, Option
from trainer.config_check import Fault, cross_faults, resolve

T = TypeVar("T")
PREFIX = "config:"  # argparse destinations of dotted flags, apart from a verb's own
HINT = "examples/gpt-small.toml documents every key; so does: trainer train --help"


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """One field of the configuration: its dotted name, type, default and Option."""

    name: str
    annotation: Any
    default: Any
    option: Option

    @property
    def flag(self) -> str:
        """The dotted flag, in kebab case."""
        return "--" + self.name.replace("_", "-")


@dataclasses.dataclass(frozen=True, slots=True)
class FlagText:
    """A value that came as text from the command line; several of a flag that may be repeated."""

    text: str
    flag: str
    more: tuple[str, ...] = ()


class Mismatch(ValueError):
    """A value that does not fit its field; the message says what would."""


def load_config(path: str | None, overrides: Mapping[str, FlagText] | None = None, *, world_size: int = 1) -> Config:
    """The checked configuration of a run on `world_size` ranks, with every size that was left at 0 filled in.

    Raises one UserError that lists all faults; a vocab_size of 0 stays, the token stores know it.
    """
    return config_from(read_toml(path) if path else {}, overrides, source=path or "flags", world_size=world_size)


def config_from(
    tables: Mapping[str, Any],
    overrides: Mapping[str, FlagText] | None = None,
    *,
    source: str,
    world_size: int = 1,
) -> Config:
    """The checked configuration from nested tables; see load_config."""
    found: list[Fault] = []
    config = walk(Config, merge(tables, overrides or {}), "", found)
    doubtful = {name for names, _ in found for name in names}  # these hold defaults: what they imply is no fault
    found += [fault for fault in cross_faults(config, world_size) if not implied(fault, doubtful)]
    if found:
        texts = [text for _, text in found]
        message = texts[0] if len(texts) == 1 else f"{len(texts)} faults\n  " + "\n  ".join(texts)
        raise UserError(f"{source}: {message}", hint=HINT)
    return resolve(config, world_size)


def implied(fault: Fault, doubtful: set[str]) -> bool:
    """Whether a fault between fields rests on one, or on a whole table, that has a fault of its own."""
    return any(field == name or field.startswith(name + ".") for field in fault[0] for name in doubtful)


def read_toml(path: str) -> dict[str, Any]:
    """The tables of a TOML file; UserError where it is missing or is no TOML."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"no configuration file {path}", hint="start from examples/gpt-small.toml") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"cannot read {path} as TOML: {error}", hint="examples/gpt-small.toml is a sample") from error


def merge(tables: Mapping[str, Any], overrides: Mapping[str, FlagText]) -> dict[str, Any]:
    """A copy of nested tables with dotted overrides put in."""
    merged = {key: merge(value, {}) if isinstance(value, Mapping) else value for key, value in tables.items()}
    for name, value in overrides.items():
        *path, last = name.split(".")
        table = merged
        for part in path:
            inner = table.setdefault(part, {})
            if not isinstance(inner, dict):  # the file has a plain value here: the walker reports that
                break
            table = inner
        else:
            table[last] = value
    return merged


def walk(cls: type[T], table: Mapping[str, Any], prefix: str, faults: list[Fault]) -> T:
    """An instance of a config dataclass; each fault of the table goes into `faults` and leaves the default."""
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(typing.cast(Any, cls))]
    for key in table:
        if key not in names:
            meant = suggest(key, names, prefix)
            advice = f"did you mean {meant}?" if meant else f"known are {', '.join(names)}"
            faults.append(({meant}, f"{prefix}{key}: unknown key, {advice}"))
    values: dict[str, Any] = {}
    for field in dataclasses.fields(typing.cast(Any, cls)):
        if field.name not in table:
            continue
        value, name = table[field.name], prefix + field.name
        if dataclasses.is_dataclass(hints[field.name]):
            if isinstance(value, Mapping):
                values[field.name] = walk(typing.cast(Any, hints[field.name]), value, name + ".", faults)
            else:
                faults.append(({name}, f"{name}: must be a table [{name}], got {value!r}"))
            continue
        try:
            values[field.name] = convert(value, hints[field.name], field.metadata["option"])
        except Mismatch as mismatch:
            origin = f" (from {value.flag})" if isinstance(value, FlagText) else ""
            shown = value.text if isinstance(value, FlagText) else value
            faults.append(({name}, f"{name}: must be {mismatch}, got {shown!r}{origin}"))
    return cls(**values)


def suggest(key: str, names: list[str], prefix: str) -> str:
    """The dotted name that an unknown key may have meant, in its own table or another; empty where none is close."""
    close = difflib.get_close_matches(key, names, 1, 0.6)
    if close:
        return prefix + close[0]
    elsewhere = {leaf.name.rpartition(".")[2]: leaf.name for leaf in leaves()}
    close = difflib.get_close_matches(key, elsewhere, 1, 0.8)
    return elsewhere[close[0]] if close else ""


def convert(value: Any, annotation: Any, described: Option) -> Any:
    """A TOML value or a flag's text as the type of its field, within its range; Mismatch says what would fit."""
    if typing.get_origin(annotation) is tuple:
        item = typing.get_args(annotation)[0]
        if described.repeats and isinstance(value, FlagText | str):
            texts = [value.text, *value.more] if isinstance(value, FlagText) else [value]
            value = [text for text in texts if text]
        elif isinstance(value, FlagText):
            value = [FlagText(text.strip(), value.flag) for text in value.text.split(",") if text.strip()]
        if not isinstance(value, list | tuple):
            raise Mismatch(f"a list of {KINDS[item]}")
        return tuple(convert(element, item, described) for element in value)
    if typing.get_origin(annotation) is Literal:
        choices = typing.get_args(annotation)
        for choice in choices:
            same = type(value) is type(choice) and value == choice
            if same or (isinstance(value, FlagText) and value.text == str(choice)):
                return choice
        raise Mismatch(f"one of {', '.join(map(str, choices))}")
    parsed = parse_text(value.text, annotation) if isinstance(value, FlagText) else value
    if annotation is float and isinstance(parsed, int) and not isinstance(parsed, bool):
        parsed = float(parsed)
    if type(parsed) is not annotation or (annotation is float and not math.isfinite(parsed)):
        raise Mismatch(KINDS[annotation])
    if annotation in (int, float):
        check_range(parsed, described)
    return parsed


KINDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def parse_text(text: str, annotation: type) -> Any:
    """A flag's text as int, float, bool or str; Mismatch where it is none."""
    if annotation is bool:
        if text.lower() not in ("true", "false"):
            raise Mismatch(KINDS[bool])
        return text.lower() == "true"
    try:
        return annotation(text)
    except ValueError:
        raise Mismatch(KINDS[annotation]) from None


def check_range(value: float, described: Option) -> None:
    """Mismatch where a number lies outside its field's range."""
    bounds = [
        ("at least", described.minimum, operator.ge),
        ("above", described.above, operator.gt),
        ("at most", described.maximum, operator.le),
        ("below", described.below, operator.lt),
    ]
    if any(bound is not None and not holds(value, bound) for _, bound, holds in bounds):
        raise Mismatch(" and ".join(f"{word} {bound:g}" for word, bound, _ in bounds if bound is not None))


def leaves(cls: type = Config, prefix: str = "") -> Iterator[Leaf]:
    """All fields of the configuration, table by table."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        name, annotation = prefix + field.name, hints[field.name]
        if dataclasses.is_dataclass(annotation):
            yield from leaves(typing.cast(type, annotation), name + ".")
        else:
            yield Leaf(name, annotation, field.default, field.metadata["option"])


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the dotted flag of every field, with its short ones, grouped by table."""
    groups: dict[str, Any] = {}
    for leaf in leaves():
        table = leaf.name.rpartition(".")[0]
        if table not in groups:
            groups[table] = parser.add_argument_group(f"[{table}]")
        default = ",".join(leaf.default) if isinstance(leaf.default, tuple) else leaf.default
        text = leaf.option.help + (f" (default: {default})" if default != "" else "")
        groups[table].add_argument(
            *leaf.option.flags,
            leaf.flag,
            dest=PREFIX + leaf.name,
            default=argparse.SUPPRESS,
            metavar="S" if leaf.option.repeats else metavar(leaf.annotation),
            action="append" if leaf.option.repeats else "store",
            help=text.replace("%", "%%"),
        )
    for flag, name, value in (("--bf16", "train.precision", "bf16"), ("--strict", "checkpoint.strict", "true")):
        groups[name.rpartition(".")[0]].add_argument(
            flag,
            dest=PREFIX + name,
            action="store_const",
            const=value,
            default=argparse.SUPPRESS,
            help=f"short for --{name} {value}",
        )


def metavar(annotation: Any) -> str:
    """How a flag's value is shown in the help."""
    if typing.get_origin(annotation) is Literal:
        return "|".join(map(str, typing.get_args(annotation)))
    if typing.get_origin(annotation) is tuple:
        return "A,B,..."
    return {int: "N", float: "X", str: "S", bool: "true|false"}[annotation]


def flag_overrides(arguments: argparse.Namespace) -> dict[str, FlagText]:
    """The overrides that were given on a command line parsed with add_flags."""
    found = {}
    for key, value in vars(arguments).items():
        if PREFIX in key:
            name = key.removeprefix(PREFIX)
            text, *more = value if isinstance(value, list) else [str(value)]
            found[name] = FlagText(text, "--" + name.replace("_", "-"), tuple(more))
    return found
