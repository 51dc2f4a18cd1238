"""What a program passes to the stream's classes: another type is refused where it is passed, with what to write."""

from operator import index
from typing import TypeVar

from threefold.errors import UserError

T = TypeVar("T")


def require(name: str, value: object, kind: type[T], example: str) -> T:
    """Return a value of this class; UserError, whose hint is the example, if it is of another."""
    if not isinstance(value, kind):
        raise UserError(f"{name} is of class {kind.__name__}, not {type(value).__name__}", hint=example)
    return value


def whole_number(name: str, value: object, least: int = 0) -> int:
    """Return a whole number of any integer type; UserError if it is not one, or less than `least`."""
    try:
        number = index(value)  # type: ignore[arg-type]  # what it is not is what the except is for
    except TypeError:
        number = least - 1
    if number < least:
        raise UserError(f"{name} is a whole number of {least} or more, not {value!r}", hint=f"{name}={least}")
    return number
