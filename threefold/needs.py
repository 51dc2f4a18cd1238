"""What options need of each other: an option that would be without effect is a fault, and is never ignored in silence.

`option(..., needs={"order": "megatron"})` names a field of the same table, or one of the root as `table.field`, and the
value that it must have: one, several in a tuple, or GIVEN for any but the default. A function of the table is a need
too; its key ends the sentence. Only a value other than the default needs anything.
"""

import dataclasses
import json
from collections.abc import Collection, Iterator
from functools import cache
from typing import Any, TypeVar

from threefold.options import Fault, Option

T = TypeVar("T")
GIVEN = object()


def unmet(root: Any, prefix: str = "") -> list[Fault]:
    """Return a fault for each option of nested tables that has no effect, as another one is not as it needs."""
    return [
        fault
        for table, name in _tables(root, prefix)
        for field, default in _needing(table.__class__)
        if getattr(table, field.name) != default
        for fault in _faults_of(table, field, name, root)
    ]


def effective(root: T, *, but: Collection[str]) -> T:
    """Return nested tables with the default in place of each value without effect, but for the names in `but`.

    Older runs recorded such values: they go on as they began.
    """
    return _effective(root, "", root, but)


def _effective(table: T, prefix: str, root: Any, but: Collection[str]) -> T:
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(table):  # type: ignore[arg-type]
        value, name = getattr(table, field.name), prefix + field.name
        if dataclasses.is_dataclass(value):
            changed[field.name] = _effective(value, f"{name}.", root, but)
        elif name not in but and any(_faults_of(table, field, prefix, root)):
            changed[field.name] = _default_of(field)
    return dataclasses.replace(table, **changed)  # type: ignore[type-var]


@cache
def _needing(kind: type) -> "list[tuple[dataclasses.Field[Any], Any]]":
    """Return the fields of a table that need something, each with its default."""
    fields = dataclasses.fields(kind)
    return [(field, _default_of(field)) for field in fields if field.metadata.get("option", Option()).needs]


def _tables(table: Any, prefix: str) -> Iterator[tuple[Any, str]]:
    """Yield a table and all tables in it, each with what its fields' names begin with."""
    yield table, prefix
    for name in _names(table.__class__):
        value = getattr(table, name)
        if dataclasses.is_dataclass(value):
            yield from _tables(value, f"{prefix}{name}.")


@cache
def _names(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _faults_of(table: Any, field: "dataclasses.Field[Any]", prefix: str, root: Any) -> Iterator[Fault]:
    option, own = field.metadata.get("option", Option()), prefix + field.name
    if not option.needs or getattr(table, field.name) == _default_of(field):
        return
    for other, needed in option.needs.items():
        if callable(needed):
            if not needed(table):
                yield {own}, f"{own} needs {other}"
            continue
        owner, _, last = other.rpartition(".")
        holder = _table_of(root, owner) if owner else table
        fields = {} if holder is None else {field.name: field for field in dataclasses.fields(holder)}
        if last in fields and not _is_met(needed, getattr(holder, last), fields[last]):
            name = other if owner else prefix + last
            yield {own, name}, f"{own} needs {name}{_wanted(needed, name, getattr(holder, last))}"


def _table_of(root: Any, owner: str) -> Any:
    """Return a table by its dotted name, None if the root has no such table: it is another program's."""
    for name in owner.split("."):
        root = getattr(root, name, None)
    return root


def _is_met(needed: Any, value: Any, field: "dataclasses.Field[Any]") -> bool:
    if needed is GIVEN:
        return bool(value != _default_of(field))
    return value in needed if isinstance(needed, tuple) else bool(value == needed)


def _wanted(needed: Any, name: str, value: Any) -> str:
    """Return what a field must be, what it is, and a flag that mends it; nothing if it must only be given."""
    if needed is GIVEN:
        return ""
    choices = needed if isinstance(needed, tuple) else (needed,)
    flag = f"--{name.replace('_', '-')} {_text_of(choices[0]).strip(chr(34))}"
    return f" = {' or '.join(map(_text_of, choices))}, which is {_text_of(value)}: {flag}"


def _default_of(field: "dataclasses.Field[Any]") -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _text_of(value: Any) -> str:
    """Return a value as TOML writes it."""
    return json.dumps(value)
