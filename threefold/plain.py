"""Plain values: dataclasses out of what `dataclasses.asdict`, and then JSON, made of them."""

import dataclasses
import typing
from functools import cache
from types import NoneType
from typing import Any

_hints = cache(typing.get_type_hints)


def from_plain(kind: Any, value: Any) -> Any:
    """Return the value of a type: a dataclass, a tuple of one type or of what JSON has, or any of these or None."""
    kinds = [each for each in typing.get_args(kind) if each is not NoneType]
    if dataclasses.is_dataclass(kind):
        made: Any = kind
        return made(**{name: from_plain(_hints(made)[name], item) for name, item in value.items()})
    if typing.get_origin(kind) is tuple:
        return tuple(from_plain(kinds[0], item) for item in value)
    if value is not None and NoneType in typing.get_args(kind):
        return from_plain(kinds[0], value)
    return value
