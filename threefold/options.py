"""Options as fields of frozen dataclasses: tables of TOML and texts of flags become an instance, or a list of faults.

A field's type and its Option say all that is known of it: what fits, its help and its flags. One walker reads any such
class, whether it holds the flags of one verb or the nested tables of a configuration, and reports every fault at once.
Types are int, float, str, bool, Literal, `X | None`, tuples of these or of tuples, `dict[str, X]` (a table with any
keys), and dataclasses: a table, or in a tuple an array of tables. Nothing heavy is imported here: every --help reads
this file.
"""

import dataclasses
import difflib
import math
import operator
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from threefold.errors import UserError

T = TypeVar("T")
Fault = tuple[set[str], str]  # the fields that take part, and the sentence
KINDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
BOUNDS = (
    ("minimum", "at least", ">=", operator.ge),
    ("above", "above", ">", operator.gt),
    ("maximum", "at most", "<=", operator.le),
    ("below", "below", "<", operator.lt),
)


OTHER_NAMES = {  # of choices, as other programs call the same thing
    "bf16": ("bfloat16", "brain"),
    "fp16": ("float16", "half", "f16"),
    "fp32": ("float32", "single", "float", "f32", "32"),
    "fp64": ("float64", "double", "f64", "64"),
    "cuda": ("gpu", "nvidia"),
    "none": ("off", "no", "false"),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What one field says of itself: its help, its range (`above` and `below` exclude their bound) and its flags.

    `flag` is the flag of the field, where it is not the field's name; `flags` are further spellings. `bare` are the
    values of the flag without one and of its `--no-` form, which true and false have anyway. `shorthands` are flags
    without a value, each with the value it is short for; `scaled` are flags of another unit, each with the number
    that its value is multiplied by. A tuple that `repeats` is given by repeating its flag,
    not by commas, and may be one text in TOML. An argument that `takes_rest` has all words of the command line as they
    are, flags too. `parse` reads a text where the type says too little; its ValueError says
    what is wrong. Of the fields that share an `exclusive` name one may be given. With `keeps_bits` a run that goes on
    with another value repeats its bits, or is refused. `needs` are other fields, without whose values it has no effect:
    `threefold.needs` makes a fault of each that is not so.
    """

    help: str = ""
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None
    flag: str = ""
    flags: Sequence[str] = ()
    bare: tuple[str, str] | None = None
    shorthands: Mapping[str, str] = dataclasses.field(default_factory=dict)
    scaled: Mapping[str, float] = dataclasses.field(default_factory=dict)
    repeats: bool = False
    metavar: str | tuple[str, ...] | None = None
    is_positional: bool = False
    takes_rest: bool = False
    parse: Callable[[str], Any] | None = None
    exclusive: str = ""
    needs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    keeps_bits: bool = False


def option(default: Any, help: str, **described: Any) -> Any:
    """Return a dataclass field with its Option and its default: `...` if it has none, a function if it is made."""
    kind = "default_factory" if callable(default) else "default"
    defaults = {} if default is ... else {kind: default}
    return dataclasses.field(**defaults, metadata={"option": Option(help=help, **described)})


def argument(metavar: str, help: str, default: Any = ..., **described: Any) -> Any:
    """Return a dataclass field that is given by its place on the command line."""
    return option(default, help, metavar=metavar, is_positional=True, **described)


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """One field that is not a table of its own: its dotted name, type, default (MISSING if it has none) and Option."""

    name: str
    annotation: Any
    default: Any
    option: Option

    @property
    def flag(self) -> str:
        """The flag in kebab case; dotted for a field of a table."""
        return self.option.flag or "--" + self.name.replace("_", "-")

    @property
    def kind(self) -> Any:
        """The type of what is given: the annotation without its `| None`."""
        return without_none(self.annotation)


@dataclasses.dataclass(frozen=True, slots=True)
class FlagText:
    """A value that came as text from the command line; several of a flag that may be repeated."""

    text: str
    flag: str
    more: tuple[str, ...] = ()


class Mismatch(ValueError):
    """A value that does not fit its field; the message says what would."""


def read_toml(path: str, *, sample: str) -> dict[str, Any]:
    """Return the tables of a TOML file; UserError, with a sample to start from, if it is missing or not TOML."""
    import tomllib  # no --help pays for it

    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"no configuration file {path}", hint=f"start from {sample}") from None
    except (OSError, UnicodeDecodeError, RecursionError, tomllib.TOMLDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"cannot read {path} as TOML: {cause}", hint=f"{sample} is a sample") from error


def raise_faults(source: str, faults: Sequence[Fault], *, hint: str) -> None:
    """Raise one UserError that lists all faults of a source, if there are any."""
    texts = [text for _, text in faults]
    if texts:
        message = texts[0] if len(texts) == 1 else f"{len(texts)} faults\n  " + "\n  ".join(texts)
        raise UserError(f"{source}: {message}", hint=hint)


def merge(tables: Mapping[str, Any], overrides: Mapping[str, FlagText]) -> dict[str, Any]:
    """Return a copy of nested tables with dotted overrides put in."""
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


def walk(cls: type[T], table: Mapping[str, Any], faults: list[Fault], *, prefix: str = "", root: type = object) -> T:
    """Return an instance of a dataclass; each fault of the table goes into `faults` and leaves the default."""
    root = cls if root is object else root
    fields, hints = dataclasses.fields(typing.cast(Any, cls)), typing.get_type_hints(cls)
    names = [field.name for field in fields]
    for key in table:
        if key not in names:
            meant = suggest(key, names, prefix, root)
            advice = f"did you mean {meant}?" if meant else f"known are {', '.join(names)}"
            faults.append(({meant}, f"{prefix}{key}: unknown key, {advice}"))
    values: dict[str, Any] = {}
    for field in fields:
        name = prefix + field.name
        if field.default is field.default_factory is dataclasses.MISSING:
            values[field.name] = None
            if field.name not in table:
                faults.append(({name}, f"{name}: must be given"))
        if field.name not in table:
            continue
        value, annotation = table[field.name], hints[field.name]
        try:
            if dataclasses.is_dataclass(annotation):
                if not isinstance(value, Mapping):
                    raise Mismatch(f"a table [{name}]")
                values[field.name] = walk(typing.cast(Any, annotation), value, faults, prefix=f"{name}.", root=root)
            elif is_array(annotation):
                [item, *_] = typing.get_args(annotation)
                values[field.name] = tuple(
                    walk(item, element, faults, prefix=f"{name}[{number}].", root=root)
                    for number, element in enumerate(elements(value, name))
                )
            else:
                values[field.name] = convert(value, annotation, field.metadata["option"])
        except Mismatch as mismatch:
            origin = f" (from {value.flag})" if isinstance(value, FlagText) else ""
            shown = value.text if isinstance(value, FlagText) else value
            faults.append(({name}, f"{name}: must be {mismatch}, got {shown!r}{origin}"))
    return cls(**values)


def elements(value: Any, name: str) -> list[Mapping[str, Any]]:
    """Return the tables of an array of tables; of a flag, each text of it is one, written KEY=VALUE,KEY=VALUE."""
    if isinstance(value, FlagText):
        pairs = [[pair.partition("=") for pair in text.split(",")] for text in (value.text, *value.more)]
        if not all(sign for table in pairs for _, sign, _ in table):
            raise Mismatch("KEY=VALUE,KEY=VALUE")
        return [{key.strip(): FlagText(text, value.flag) for key, _, text in table} for table in pairs]
    if not isinstance(value, list | tuple) or not all(isinstance(element, Mapping) for element in value):
        raise Mismatch(f"tables [[{name}]]")
    return list(value)


def suggest(key: str, names: list[str], prefix: str, root: type) -> str:
    """Return the dotted name an unknown key may have meant, in its own table or another; empty if none is close."""
    close = difflib.get_close_matches(key, names, 1, 0.6)
    if close:
        return prefix + close[0]
    elsewhere = {leaf.name.rpartition(".")[2]: leaf.name for leaf in leaves(root)}
    close = difflib.get_close_matches(key, elsewhere, 1, 0.8)
    return elsewhere[close[0]] if close else ""


def convert(value: Any, annotation: Any, described: Option) -> Any:
    """Return a TOML value or a flag's text as the type of its field, within its range; Mismatch says what would fit."""
    if value is None and annotation is not without_none(annotation):
        return None
    annotation = without_none(annotation)
    if typing.get_origin(annotation) is tuple and not (described.parse and not described.repeats):
        item = typing.get_args(annotation)[0]
        if described.repeats and isinstance(value, FlagText | str):
            texts = [value.text, *value.more] if isinstance(value, FlagText) else [value]
            value = [text for text in texts if text]
        elif isinstance(value, FlagText):
            words = ",".join([value.text, *value.more]).split(",")
            texts = [text.strip() for text in words if text.strip()]
            is_nested = typing.get_origin(item) is tuple  # A:B
            value = [
                [FlagText(part, value.flag) for part in text.split(":")] if is_nested else FlagText(text, value.flag)
                for text in texts
            ]
        if not isinstance(value, list | tuple):
            raise Mismatch(f"a list of {KINDS.get(item, 'lists')}")
        return tuple(convert(element, item, described) for element in value)
    if typing.get_origin(annotation) is dict:
        _, item = typing.get_args(annotation)
        if not isinstance(value, Mapping):
            raise Mismatch(f"a table of names, each with {KINDS[item]}")
        return {str(key): convert(element, item, described) for key, element in value.items()}
    text = value.text if isinstance(value, FlagText) else value
    if described.parse is not None and isinstance(text, str):
        try:
            return described.parse(text)
        except ValueError as error:
            raise Mismatch(str(error)) from None
    if typing.get_origin(annotation) is Literal:
        choices = typing.get_args(annotation)
        for choice in choices:
            same = type(value) is type(choice) and value == choice
            if same or (isinstance(value, FlagText) and value.text == str(choice)):
                return choice
        meant = choice_meant(str(text), choices)
        raise Mismatch(f"one of {', '.join(map(str, choices))}" + (f" (did you mean {meant}?)" if meant else ""))
    parsed = parse_text(value.text, annotation) if isinstance(value, FlagText) else value
    if annotation is float and isinstance(parsed, int) and not isinstance(parsed, bool):
        parsed = float(parsed)
    if type(parsed) is not annotation or (annotation is float and not math.isfinite(parsed)):
        raise Mismatch(KINDS.get(annotation, "text"))
    if annotation in (int, float) and not is_within(parsed, described):
        raise Mismatch(" and ".join(f"{word} {bound}" for word, _, bound in bounds_of(described)))
    return parsed


def choice_meant(text: str, choices: Sequence[Any]) -> str | None:
    """Return which of some choices a text is another name of, None if it is none that is known."""
    plain = text.lower().removeprefix("torch.")
    names = map(str, choices)
    return next((name for name in names if plain == name.lower() or plain in OTHER_NAMES.get(name, ())), None)


def parse_text(text: str, annotation: type) -> Any:
    """Return a flag's text as int, float, bool or str; Mismatch if it is not one."""
    if annotation is bool:
        if text.lower() not in ("true", "false"):
            raise Mismatch(KINDS[bool])
        return text.lower() == "true"
    try:
        return annotation(text)
    except ValueError:
        raise Mismatch(KINDS[annotation]) from None


def is_within(value: float, described: Option) -> bool:
    """Return whether a number is in its field's range."""
    bounds = ((getattr(described, name), holds) for name, _, _, holds in BOUNDS)
    return all(bound is None or holds(value, bound) for bound, holds in bounds)


def bounds_of(described: Option) -> list[tuple[str, str, float]]:
    """Return a word, a sign and a number for each bound of a field's range."""
    found = ((word, sign, getattr(described, name)) for name, word, sign, _ in BOUNDS)
    return [(word, sign, bound) for word, sign, bound in found if bound is not None]


def leaves(cls: type, prefix: str = "", *, keeps_bits: bool = False) -> Iterator[Leaf]:
    """Yield all fields of a dataclass, table by table; in a table that keeps bits, each field does."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        name, annotation = prefix + field.name, hints[field.name]
        described = field.metadata.get("option", Option())
        if keeps_bits:
            described = dataclasses.replace(described, keeps_bits=True)
        if dataclasses.is_dataclass(annotation):
            yield from leaves(typing.cast(type, annotation), name + ".", keeps_bits=described.keeps_bits)
        elif "option" in field.metadata:
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            yield Leaf(name, annotation, default, described)


def is_array(annotation: Any) -> bool:
    """Return whether a field is an array of tables."""
    return typing.get_origin(annotation) is tuple and dataclasses.is_dataclass(typing.get_args(annotation)[0])


def without_none(annotation: Any) -> Any:
    """Return `X` of `X | None`, any other type as it is."""
    if typing.get_origin(annotation) not in (types.UnionType, typing.Union):
        return annotation
    [kind] = [each for each in typing.get_args(annotation) if each is not type(None)]
    return kind
