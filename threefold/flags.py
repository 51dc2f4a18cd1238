"""Flags out of the fields of options: those of one verb, and the dotted ones of a configuration's tables.

A verb's flags are converted where they are parsed: a fault is a usage fault of that verb. A configuration's stay texts,
for the walker of `threefold.options` to report their faults together with those of the file.
"""

import argparse
import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

from threefold.options import KINDS, FlagText, Leaf, Mismatch, bounds_of, convert, is_array, leaves

T = TypeVar("T")
PREFIX = "settings:"  # argparse destinations of a configuration's flags, apart from a verb's own
Settings = Mapping[str, FlagText]  # what was given of a configuration's flags, by dotted name


class BareAction(argparse.Action):
    """An argument that may do without its value: `bare` are the values of the flag alone and of its `--no-` form."""

    def __init__(self, *, bare: tuple[str, str], words: Mapping[str, str], **described: Any) -> None:
        """Take, beside what argparse wants, which word behind the flag is its value, and which value."""
        super().__init__(**described)
        self.bare, self.words = bare, words

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Keep the value."""
        setattr(namespace, self.dest, values)


class ShortAction(argparse.Action):
    """A flag that is short for a value of an option; another one for another value of it is a usage fault."""

    def __init__(self, *, const: str, **described: Any) -> None:
        """Take the value."""
        super().__init__(nargs=0, const=const, **described)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        _values: object,
        option_string: str | None = None,
    ) -> None:
        """Keep the value, and which flag it came by."""
        key = f"short for {self.dest}"
        before, value = getattr(namespace, key, (option_string, self.const))
        if value != self.const:
            parser.error(f"{before} and {option_string} are two values of --{self.dest.removeprefix(PREFIX)}")
        setattr(namespace, key, (option_string, self.const))
        setattr(namespace, self.dest, self.const)


def settings(cls: type, *, hidden: str = "", foreign: Callable[..., Any] | None = None) -> Any:
    """Return a field of a verb's options that gets what is given of a configuration's flags.

    `hidden` says where their help is, for a verb whose own help leaves them out. `foreign` knows flags of other
    programs: a `threefold.rewording.Foreign`.
    """
    return dataclasses.field(default_factory=dict, metadata={"settings": cls, "hidden": hidden, "foreign": foreign})


def foreign_of(cls: type) -> tuple[bool, Callable[..., Any] | None]:
    """Return whether a verb's options have a configuration's flags, and what knows those of other programs."""
    found = [field.metadata["foreign"] for field in dataclasses.fields(cls) if "settings" in field.metadata]
    return bool(found), next(iter(found), None)


def add_options(parser: argparse.ArgumentParser, cls: type) -> None:
    """Add an argument for each field of a verb's options."""
    groups: dict[str, Any] = {}
    for leaf in leaves(cls):
        group = leaf.option.exclusive
        if group and group not in groups:
            groups[group] = parser.add_mutually_exclusive_group()
        add_option(groups.get(group, parser), leaf)
    for field in dataclasses.fields(cls):
        if "settings" in field.metadata:
            hidden = field.metadata["hidden"]
            usage = parser.format_usage().removeprefix("usage: ").rstrip()
            parser.usage = f"{usage} [flags]".replace("%", "%%")
            parser.epilog = hidden or None
            add_settings(parser, field.metadata["settings"], is_shown=not hidden)


def read_options(cls: type[T], arguments: argparse.Namespace) -> T:
    """Return the options of a verb out of a command line parsed with add_options."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(typing.cast(Any, cls)):
        if "settings" in field.metadata:
            values[field.name] = settings_of(arguments)
        elif hasattr(arguments, field.name):
            value = getattr(arguments, field.name)
            values[field.name] = tuple(value) if isinstance(value, list) else value
    return cls(**values)


def add_option(target: Any, leaf: Leaf) -> None:
    """Add one argument of a verb; what is not given leaves no trace, as the dataclass holds the defaults."""
    described, kind, has_default = leaf.option, leaf.kind, leaf.default is not dataclasses.MISSING
    is_list = typing.get_origin(kind) is tuple and (described.is_positional or described.repeats)
    word: dict[str, Any] = {"default": argparse.SUPPRESS}
    shown = "" if leaf.default in (None, "", ()) or leaf.default is False or not has_default else leaf.default
    word["help"] = with_default(described.help, shown)
    if kind is bool:
        target.add_argument(leaf.flag, *described.flags, dest=leaf.name, action="store_true", **word)
        return
    item = typing.get_args(kind)[0] if is_list else kind
    if typing.get_origin(item) is Literal:
        word["choices"] = typing.get_args(item)
        word["type"] = type(word["choices"][0])
    elif item is not str or described.parse:
        word["type"] = text_type(item, leaf)
    word["metavar"] = described.metavar
    if described.is_positional:
        if is_list or has_default:
            word["nargs"] = ("*" if has_default else "+") if is_list else "?"
        target.add_argument(leaf.name, **word)
        if described.takes_rest:
            target.take_rest(leaf.name)
        return
    if is_list:
        word["action"] = "append"
    target.add_argument(leaf.flag, *described.flags, dest=leaf.name, required=not has_default, **word)


def text_type(annotation: Any, leaf: Leaf) -> Any:
    """Return the argparse type of one field, which says of a text what it is not."""

    def parse(text: str) -> Any:
        try:
            return convert(FlagText(text, leaf.flag), annotation, leaf.option)
        except Mismatch as mismatch:
            if leaf.option.parse:
                raise argparse.ArgumentTypeError(str(mismatch)) from None
            if annotation not in KINDS:
                raise argparse.ArgumentTypeError(f"{text!r}: each must be {mismatch}") from None
            bounds = " and ".join(f"{sign} {bound}" for _, sign, bound in bounds_of(leaf.option))
            raise argparse.ArgumentTypeError(f"{text!r} is not {KINDS[annotation]} {bounds}".rstrip()) from None

    return parse


def add_settings(parser: argparse.ArgumentParser, cls: type, *, is_shown: bool = True) -> None:
    """Add the dotted flag of every field of a configuration, with its short ones, grouped by table."""
    groups: dict[str, Any] = {}
    for leaf in leaves(cls):
        table, described = leaf.name.rpartition(".")[0], leaf.option
        if table not in groups:
            groups[table] = parser.add_argument_group(f"[{table}]" if table else None)
        default = ",".join(map(str, leaf.default)) if isinstance(leaf.default, tuple) else leaf.default
        repeats = described.repeats or is_array(leaf.annotation)
        word: dict[str, Any] = {"dest": PREFIX + leaf.name, "default": argparse.SUPPRESS}
        shown = described.metavar or metavar(leaf.kind, repeats)
        bare = bare_of(leaf)
        how = {"nargs": len(shown)} if isinstance(shown, tuple) else {"action": "append" if repeats else "store"}
        groups[table].add_argument(
            *described.flags,
            leaf.flag,
            metavar=f"[{shown}]" if bare else shown,
            help=with_default(described.help, default) if is_shown else argparse.SUPPRESS,
            **(bare or how),
            **word,
        )
        for flag, value in described.shorthands.items():
            text = f"short for {leaf.flag} {value}" if is_shown else argparse.SUPPRESS
            groups[table].add_argument(flag, action=ShortAction, const=value, help=text, **word)
        for flag, factor in described.scaled.items():
            text = f"{leaf.flag} in units of {factor:g}" if is_shown else argparse.SUPPRESS
            groups[table].add_argument(
                flag, metavar=metavar(leaf.kind, False), type=partial(scaled, factor=factor), help=text, **word
            )


def bare_of(leaf: Leaf) -> dict[str, Any]:
    """Return what makes a BareAction of a flag that may do without its value; nothing for others."""
    bare = ("true", "false") if leaf.kind is bool else leaf.option.bare
    if bare is None:
        return {}
    choices = typing.get_args(leaf.kind) if typing.get_origin(leaf.kind) is Literal else ()
    words = {str(choice): str(choice) for choice in choices} | {"true": bare[0], "false": bare[1]}
    return {"action": BareAction, "bare": bare, "words": words}


def scaled(text: str, *, factor: float) -> str:
    """Return the text of a number times a factor; any other text as it is, whose fault the walker reports."""
    try:
        return repr(float(text) * factor)
    except ValueError:
        return text


def with_default(text: str, default: Any) -> str:
    """Return a help text with its default, if there is one to show, as argparse wants it."""
    return (text + (f" (default: {default})" if default != "" else "")).replace("%", "%%")


def metavar(kind: Any, repeats: bool) -> str:
    """Return how the value of a configuration's flag is shown in the help."""
    if is_array(kind):
        return "KEY=VALUE,..."
    if repeats:
        return "S"
    if typing.get_origin(kind) is Literal:
        return "|".join(map(str, typing.get_args(kind)))
    if typing.get_origin(kind) is tuple:
        return "A,B,..."
    return {int: "N", float: "X", str: "S", bool: "true|false"}[kind]


def settings_of(arguments: argparse.Namespace) -> dict[str, FlagText]:
    """Return what was given of a configuration's flags on a command line parsed with add_settings."""
    settings = {}
    for key, value in vars(arguments).items():
        if key.startswith(PREFIX):
            name = key.removeprefix(PREFIX)
            if isinstance(value, FlagText):
                settings[name] = value
                continue
            text, *more = value if isinstance(value, list) else [str(value)]
            settings[name] = FlagText(text, "--" + name.replace("_", "-"), tuple(more))
    return settings
