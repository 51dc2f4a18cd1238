"""The page of a run's configuration: every key with its type, default, range, unit and flags, out of its option."""

import dataclasses
import inspect
import typing
from typing import Any, Literal

from threefold.options import KINDS, Leaf, bounds_of, is_array, leaves
from tools.site.markdown import block, code, plain, table
from trainer.config import Config

UNITS = {  # by the last word of a name
    "s": "seconds", "bytes": "bytes", "mib": "MiB", "gib": "GiB", "tflops": "TFLOP/s", "tokens": "tokens",
    "length": "tokens", "steps": "steps", "interval": "steps", "samples": "samples", "sample": "samples",
    "step": "steps", "batch_size": "samples", "layers": "layers", "epochs": "epochs", "experts": "experts",
}  # fmt: skip
INTRO = """\
---
hide: [toc]
---

# Configuration keys

A run's TOML file has these tables. Each key is a flag of [`trainer train`](commands/trainer.md#trainer-train) too, such
as `--model.num-layers 9`; flags win over the file. `trainer train CONFIG.toml --dry-run` checks all of it and starts
nothing.

**Keeps bits** says what becomes of a run that goes on with another value. *yes*: it repeats the bits of the run that
kept the old one. *no*: its numbers are others from there on, and the start reports the change.
"""
HEAD = ("key", "type", "default", "unit", "keeps bits", "what it does")


def configuration_page() -> str:
    """Return the page of all tables and keys."""
    tables: dict[str, list[Leaf]] = {}
    for leaf in leaves(Config):
        tables.setdefault(leaf.name.rpartition(".")[0], []).append(leaf)
    links = [f"[`[{name}]`](#{name.replace('.', '')})" for name in tables]
    sections = [INTRO, "Tables: " + " · ".join(links) + "\n"]
    for name, keys in tables.items():
        sections.append(section(f"[{name}]", purpose(name), keys))
        for key in keys:
            if is_array(key.annotation):
                [item, *_] = typing.get_args(key.annotation)
                inner = list(leaves(item, keeps_bits=key.option.keeps_bits))
                sections.append(section(f"[[{key.name}]]", described(item), inner))
    return "\n".join(sections)


def section(title: str, text: str, keys: list[Leaf]) -> str:
    """Return the heading and the rows of a table of the file."""
    rows = [row(key) for key in keys]
    anchor = title.strip("[]").replace(".", "")
    return f"## `{title}` {{#{anchor}}}\n\n{text}\n\n{block('keys', table(HEAD, rows))}"


def purpose(name: str) -> str:
    """Return what the class of a table says of it."""
    cls: Any = Config
    for part in name.split("."):
        cls = typing.get_type_hints(cls)[part]
    return described(cls)


def described(cls: type) -> str:
    """Return the first paragraph of a class's docstring, without the name of the table."""
    text = inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0]
    text = text.partition(": ")[2] if text.startswith("`[") else text
    return plain(text[:1].upper() + text[1:])


def row(key: Leaf) -> tuple[str, ...]:
    """Return the cells of a key."""
    short = [*key.option.flags, *(f"{flag} = {value}" for flag, value in key.option.shorthands.items())]
    name = code(key.name.rpartition(".")[2]) + "".join(f"<br>{code(flag)}" for flag in short)
    is_kept = "yes" if key.option.keeps_bits else "no"
    return name, type_of(key), default_of(key), unit_of(key.name), is_kept, plain(key.option.help)


def type_of(key: Leaf) -> str:
    """Return the type of a key in words, with its range or its choices."""
    kind = key.kind
    bounds = ", ".join(f"{sign} {bound:,}" for _, sign, bound in bounds_of(key.option))
    if typing.get_origin(kind) is Literal:
        return ", ".join(code(str(choice)) for choice in typing.get_args(kind))
    if is_array(key.annotation):
        return "tables"
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        words = "list of " + {str: "texts", int: "whole numbers", float: "numbers"}.get(item, "pairs")
    elif typing.get_origin(kind) is dict:
        words = "table of numbers"
    else:
        words = KINDS[kind].removeprefix("a ")
    return plain(words + (f", {bounds}" if bounds else ""))


def default_of(key: Leaf) -> str:
    """Return the default of a key as TOML has it; empty for none."""
    value = key.default
    if value is None or value is dataclasses.MISSING or value in ((), {}):
        return ""
    if isinstance(value, bool):
        return code(str(value).lower())
    if isinstance(value, str):
        return code(f'"{value}"')
    if isinstance(value, float):
        return code(f"{value:g}")
    return code(str(list(value) if isinstance(value, tuple) else value))


def unit_of(name: str) -> str:
    """Return the unit that the last words of a name say."""
    words = name.rpartition(".")[2].split("_")
    return UNITS.get("_".join(words[-2:])) or UNITS.get(words[-1], "")
